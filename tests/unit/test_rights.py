# SPDX-License-Identifier: Apache-2.0
"""infiniswap.rights: what a refused process lacks, and what it is told to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from infiniswap import rights
from infiniswap.cli.doctor import host
from infiniswap.device.jobs import sudo
from infiniswap.errors import NotPermittedError, from_oserror
from infiniswap.system.process import Degraded, sentences

ALL = (1 << 41) - 1


def proc_of(
    tmp_path: Path, *, uid: int = 0, without: str = "", uid_map: str = "0 0 4294967295"
) -> Path:
    """A /proc with what it says of this process."""
    capabilities = ALL if uid == 0 else 0
    if without:
        capabilities &= ~(1 << rights.CAPABILITIES[without])
    here = tmp_path / "self"
    here.mkdir()
    (here / "status").write_text(
        f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities:016x}\n"
    )
    (here / "uid_map").write_text(f"         {uid_map}\n")
    return tmp_path


def test_root_with_everything_lacks_nothing(tmp_path: Path) -> None:
    proc = proc_of(tmp_path)
    assert not any(rights.lacking(name, proc=proc) for name in rights.CAPABILITIES)
    assert rights.hint("CAP_SYS_ADMIN", proc=proc) == ""
    assert "Run it as root" not in rights.mend("CAP_SYS_ADMIN", proc=proc)


def test_another_user_lacks_root(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, uid=1000)
    assert rights.lacking("CAP_SYS_ADMIN", proc=proc) == "root"
    assert rights.mend("CAP_SYS_ADMIN", proc=proc) == "Run it as root."


@pytest.mark.parametrize("name", rights.CAPABILITIES)
def test_root_without_a_capability_is_told_its_name_once(tmp_path: Path, name: str) -> None:
    proc = proc_of(tmp_path, without=name)
    assert rights.lacking(name, proc=proc) == f"the capability {name}"
    said = rights.mend(name, proc=proc)
    assert said.count(name) == 1
    assert "Run it as root" not in said
    others = [other for other in rights.CAPABILITIES if other != name]
    assert [rights.lacking(other, proc=proc) for other in others] == [""] * len(others)


def test_root_of_a_user_namespace_is_told_that_it_is_not_the_hosts(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, uid_map="0 1000 1")
    assert rights.lacking("CAP_SYS_ADMIN", proc=proc) == "root of the host"
    assert "user namespace" in rights.mend("CAP_SYS_ADMIN", proc=proc)


def test_without_proc_nothing_is_claimed(tmp_path: Path) -> None:
    assert not rights.has("CAP_SYS_ADMIN", proc=tmp_path)
    assert rights.lacking("CAP_SYS_ADMIN", proc=tmp_path) == ""


@pytest.mark.requires_root
def test_root_is_not_told_to_run_it_as_root() -> None:
    for number in (errno.EPERM, errno.EACCES):
        assert "Run it as root" not in str(from_oserror("cannot attach", OSError(number, "no")))


def test_a_remedy_that_warnings_share_is_told_once() -> None:
    found = [
        Degraded("oom-score", "it may be killed", "Add CAP_A."),
        Degraded("memory-lock", "it may be paged out", "Raise the limit."),
        Degraded("io-flusher", "it may wait", "Add CAP_A."),
    ]
    assert sentences(found) == [
        "oom-score: it may be killed. Add CAP_A.",
        "memory-lock: it may be paged out. Raise the limit.",
        "io-flusher: it may wait. The remedy is that of oom-score.",
    ]


def test_the_doctor_does_not_call_root_without_a_capability_root(tmp_path: Path) -> None:
    (finding,) = host.root(proc=proc_of(tmp_path, without="CAP_SYS_ADMIN"))
    assert finding.state == "missing"
    assert (finding.what + finding.mend).count("CAP_SYS_ADMIN") == 1


@pytest.mark.parametrize("name", ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"])
def test_a_run_that_cannot_become_its_caller_says_why(tmp_path: Path, name: str) -> None:
    """Before anything is set up: without CAP_KILL the job could not be ended."""
    proc = proc_of(tmp_path, without=name)
    with pytest.raises(NotPermittedError) as failed:
        sudo.invoking_user({"SUDO_UID": "65534"}, proc=proc)
    assert f"needs the capability {name}." in str(failed.value)
