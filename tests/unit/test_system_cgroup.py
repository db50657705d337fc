# SPDX-License-Identifier: Apache-2.0
"""Job cgroups on made-up trees; tests/system has the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.machine.made_host import MadeHost

from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    SystemCallError,
    UnavailableError,
    UsageError,
)
from infiniswap.system import cgroup
from infiniswap.units import MIB


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Version 2 with the memory controller on, and this process deep in a limited cgroup."""
    host = MadeHost(tmp_path, version=2, own="/user.slice/job")
    host.cgroup("user.slice/job", limit=MIB)
    (host.top / "cgroup.subtree_control").write_text("cpu memory\n")
    return host.proc


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a b", "x" * 101, "ü"])
def test_names_that_would_leave_the_directory(proc: Path, name: str) -> None:
    with pytest.raises(UsageError):
        cgroup.create_memory_cgroup(name, MIB, proc=proc)


def test_a_limit_below_a_page(proc: Path) -> None:
    with pytest.raises(UsageError, match="below one page"):
        cgroup.create_memory_cgroup("a", 4095, proc=proc)


def test_a_cgroup_that_exists_is_a_conflict(proc: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup" / "a").mkdir()
    with pytest.raises(ConflictError, match="rmdir"):
        cgroup.create_memory_cgroup("a", MIB, proc=proc)


def test_nothing_is_left_when_the_limit_cannot_be_set(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str, what: str) -> None:
        raise SystemCallError(what, where=str(path))

    monkeypatch.setattr(cgroup, "write_text", refuse)
    with pytest.raises(SystemCallError, match="memory limit"):
        cgroup.create_memory_cgroup("a", MIB, proc=proc)
    assert not (tmp_path / "cgroup" / "a").exists()


def test_it_is_made_at_the_top_not_below_the_callers_own(proc: Path, tmp_path: Path) -> None:
    made = cgroup.create_memory_cgroup("a", MIB, proc=proc)
    assert made.path == tmp_path / "cgroup" / "a"
    assert (made.path / "memory.max").read_text() == str(MIB)
    made.set_limit(2 * MIB)
    assert (made.path / "memory.max").read_text() == str(2 * MIB)


def test_the_memory_controller_is_enabled_when_it_is_not(proc: Path, tmp_path: Path) -> None:
    control = tmp_path / "cgroup" / "cgroup.subtree_control"
    control.write_text("cpu\n")
    cgroup.create_memory_cgroup("a", MIB, proc=proc)
    assert control.read_text() == "+memory"


def test_a_host_without_memory_cgroups(proc: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup" / "cgroup.controllers").write_text("cpu\n")
    with pytest.raises(UnavailableError):
        cgroup.create_memory_cgroup("a", MIB, proc=proc)


def test_processes_of_the_whole_tree_are_counted(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "cgroup.procs").write_text("3\n4\n")
    (tmp_path / "inner" / "cgroup.procs").write_text("5\n0\n")  # 0: in another pid namespace
    assert cgroup.MemoryCgroup(tmp_path, 1).pids() == (3, 4, 5)
    assert cgroup.MemoryCgroup(tmp_path / "absent", 1).pids() == ()


def test_what_survives_sigkill_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("5\n")
    (tmp_path / "cgroup.kill").write_text("")
    with pytest.raises(DeadlineError, match=r"1 process did .*: 5"):
        cgroup.MemoryCgroup(tmp_path, 2).kill(timeout_s=0.05)
    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_removing_what_is_gone_does_nothing(tmp_path: Path) -> None:
    cgroup.MemoryCgroup(tmp_path / "absent", 2).remove()


def test_job_cgroups_are_found_by_name(proc: Path, tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    for name in (cgroup.run_cgroup_name("b"), cgroup.run_cgroup_name("a"), "other"):
        (top / name).mkdir()
    names = [found.name for found in cgroup.find_run_cgroups(proc=proc)]
    assert names == ["infiniswap-run-a", "infiniswap-run-b"]
