# SPDX-License-Identifier: Apache-2.0
"""Where a job's cgroup goes, on made-up trees and with a systemd that only takes notes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from infiniswap.errors import DeadlineError, NotFoundError, NotPermittedError
from infiniswap.system import cgroup_limits, job_cgroup, systemd
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.job_cgroup import SliceCgroup, create_job_cgroup, find_job_cgroups
from infiniswap.units import MIB

PID = 4711
NAME = "infiniswap-run-4711-99"


class Tree:
    """Version 2; process PID is in `own`."""

    def __init__(self, root: Path, own: str = "user.slice/user-1000.slice/session-3.scope") -> None:
        self.proc, self.top, self.own = root / "proc", root / "cgroup", root / "cgroup" / own
        self.own.mkdir(parents=True)
        for who in ("self", str(PID)):
            (self.proc / who).mkdir(parents=True)
            (self.proc / who / "cgroup").write_text(f"0::/{own}\n")
            (self.proc / who / "mountinfo").write_text(
                f"1 0 0:1 / {self.top} rw - cgroup2 none rw\n"
            )
        (self.top / "cgroup.controllers").write_text("memory\n")
        (self.top / "cgroup.subtree_control").write_text("memory\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class Notes:
    """Takes the place of systemd: makes slices and scopes as asked."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top, self.works = top, True
        self.commands: list[list[str]] = []
        monkeypatch.setattr(systemd, "has_bus", lambda: True)
        monkeypatch.setattr(job_cgroup, "run_command", self.run)
        monkeypatch.setattr(systemd, "run_command", self.run)

    def run(self, argv: Sequence[str], **_more: object) -> str:
        self.commands.append(list(argv))
        if not self.works:
            return ""
        if argv[0] == "busctl":
            unit = argv[7]
            if unit.endswith(".slice"):
                self.path(unit).mkdir()
                limit = argv[argv.index("MemoryMax") + 2]
                (self.path(unit) / "memory.max").write_text(f"{limit}\n")
            else:
                scope = self.path(argv[argv.index("Slice") + 2]) / unit
                scope.mkdir()
                (scope / "cgroup.procs").write_text(argv[argv.index("PIDs") + 3] + "\n")
        elif argv[1] == "stop":
            path = self.path(argv[3])
            for file in sorted(path.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            path.rmdir()
        return ""

    def path(self, unit: str) -> Path:
        """Where systemd puts a slice: its name tells its parents."""
        parts = unit.removesuffix(".slice").split("-")
        names = ["-".join(parts[: n + 1]) + ".slice" for n in range(len(parts))]
        return self.top.joinpath(*names)


@pytest.fixture
def notes(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Notes:
    return Notes(tree.top, monkeypatch)


def test_without_systemd_it_is_made_at_the_top(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "has_bus", lambda: False)
    (tree.top / NAME).mkdir()
    (tree.top / NAME / "memory.max").write_text("max")
    monkeypatch.setattr(Path, "mkdir", lambda *_args, **_more: None)
    assert create_job_cgroup(NAME, MIB, proc=tree.proc) == MemoryCgroup(tree.top / NAME, 2)
    assert (tree.top / NAME / "memory.max").read_text() == str(MIB)
    assert (tree.top / NAME / "memory.zswap.max").read_text() == str(int(0.4 * MIB))


@pytest.mark.parametrize("member_pid", [None, PID])
def test_a_job_is_a_slice_at_the_top(tree: Tree, notes: Notes, member_pid: int | None) -> None:
    """What is in a user's slice systemd ends as soon as nothing runs in it (user-.slice.d)."""
    made = create_job_cgroup(NAME, 64 * MIB, member_pid=member_pid, proc=tree.proc)
    assert made.path == tree.top / "infiniswap_run_4711_99.slice"
    assert made.name == NAME
    assert (made.path / "memory.zswap.max").read_text() == str(int(0.4 * 64 * MIB))
    assert notes.commands[0][7:] == [
        *("infiniswap_run_4711_99.slice", "fail", "3"),
        *("MemoryMax", "t", str(64 * MIB)),
        *("MemoryAccounting", "b", "true"),
        *("CollectMode", "s", "inactive-or-failed", "0"),
    ]
    assert find_job_cgroups(proc=tree.proc) == (made,)


def test_a_process_enters_by_a_scope_which_outlives_a_kill_for_memory(
    tree: Tree, notes: Notes
) -> None:
    made = create_job_cgroup(NAME, MIB, proc=tree.proc)
    made.add(os.getpid())
    asked = notes.commands[-1]
    assert asked[7] == "infiniswap_run_4711_99.scope"
    assert asked[asked.index("PIDs") + 1 :][:3] == ["au", "1", str(os.getpid())]
    assert asked[asked.index("Delegate") + 1 :][:2] == ["b", "true"]
    assert made.pids() == (os.getpid(),)
    # Another one needs no scope of its own.
    made.add(os.getppid())
    assert notes.commands[-1] == asked
    made.remove()
    assert not made.path.exists()
    made.remove()


def test_a_process_that_ends_before_it_has_entered(tree: Tree, notes: Notes) -> None:
    made = create_job_cgroup(NAME, MIB, proc=tree.proc)
    notes.works = False
    with pytest.raises(NotFoundError):
        made.add(2**22 + 1)


def test_a_systemd_that_does_nothing(
    tree: Tree, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "WAIT_S_MAX", 0.05)
    notes.works = False
    with pytest.raises(DeadlineError, match="journalctl"):
        create_job_cgroup(NAME, MIB, proc=tree.proc)
    assert notes.commands[-1][:2] == ["systemctl", "stop"]


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("memory.swap.max", "0"),
        ("cpu.max", "50000 100000"),
        ("io.max", "8:0 rbps=1"),
        ("cpuset.cpus", "0"),
        ("memory.zswap.max", "0"),
        ("memory.swap.high", "1048576"),
        ("hugetlb.2MB.max", "0"),
        ("hugetlb.1GB.rsvd.max", "1073741824"),
        ("rdma.max", "mlx5_0 hca_handle=max hca_object=max\nmlx5_1 hca_handle=2 hca_object=max"),
        ("misc.max", "sev max\nsev_es 10"),
        ("dmem.max", "drm/0000:03:00.0/vram0 1073741824"),
    ],
)
def test_a_job_must_not_escape_a_limit(tree: Tree, notes: Notes, file: str, value: str) -> None:
    (tree.own / file).write_text(value + "\n")
    with pytest.raises(NotPermittedError, match=file):
        create_job_cgroup(NAME, MIB, member_pid=PID, proc=tree.proc)
    assert notes.commands == []
    # Root may: it could do so without us.
    create_job_cgroup(NAME, MIB, proc=tree.proc)


@pytest.mark.parametrize(("own", "users"), [(100, 50), (50, 100), (50, "max")])
def test_the_least_limit_on_tasks_goes_with_the_job_and_some_are_none(
    tree: Tree, notes: Notes, own: int, users: object
) -> None:
    """Every service has one by default, and so have programs of a desktop session."""
    (tree.own.parent / "pids.max").write_text(f"{users}\n")  # of the user's slice
    (tree.own / "pids.max").write_text(f"{own}\n")
    (tree.own.parent.parent / "pids.max").write_text("max\n")
    (tree.own / "cpu.max").write_text("max 100000\n")
    (tree.own / "cpuset.cpus").write_text("\n")
    (tree.own / "memory.swap.high").write_text("max\n")
    (tree.own / "hugetlb.2MB.max").write_text("max\n")
    (tree.own / "rdma.max").write_text("mlx5_0 hca_handle=max hca_object=max\n")
    (tree.own / "misc.max").write_text("sev max\n")
    (tree.own / "dmem.max").write_text("drm/0000:03:00.0/vram0 max\n")
    create_job_cgroup(NAME, MIB, member_pid=PID, proc=tree.proc)
    asked = notes.commands[0]
    assert asked[asked.index("TasksMax") + 1 :][:2] == ["t", "50"]


@pytest.mark.parametrize("own", ["infiniswap-run-1-2", "infiniswap_run_1_2.slice/x.scope"])
def test_a_run_within_a_runs_job_does_not_escape_that_jobs_share_of_zswap(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new job gets a share of its own."""
    tree = Tree(tmp_path, own)
    notes = Notes(tree.top, monkeypatch)
    (tree.top / own.partition("/")[0] / "memory.zswap.max").write_text(f"{MIB}\n")
    made = create_job_cgroup(NAME, 10 * MIB, member_pid=PID, proc=tree.proc)
    assert notes.commands
    assert (made.path / "memory.zswap.max").read_text() == str(4 * MIB)


def test_without_systemd_the_limits_of_the_slice_count_too(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "has_bus", lambda: False)
    (tree.own.parent / "pids.max").write_text("10000\n")
    with pytest.raises(NotPermittedError, match=r"user-1000\.slice"):
        create_job_cgroup(NAME, MIB, member_pid=PID, proc=tree.proc)


def test_the_least_memory_limit_above_is_what_is_allowed(tree: Tree) -> None:
    assert cgroup_limits.memory_allowed_bytes(PID, proc=tree.proc) is None
    (tree.own / "memory.max").write_text("max\n")
    (tree.own.parent / "memory.max").write_text(f"{64 * MIB}\n")
    (tree.own.parent.parent / "memory.max").write_text(f"{256 * MIB}\n")
    assert cgroup_limits.memory_allowed_bytes(PID, proc=tree.proc) == 64 * MIB


@pytest.mark.parametrize(
    ("file", "value"), [("memory.swap.high", "1048576"), ("misc.max", "sev 1"), ("cpu.max", "1 2")]
)
def test_who_enters_a_job_must_not_escape_a_limit(tree: Tree, file: str, value: str) -> None:
    job = tree.top / NAME
    cgroup_limits.check_may_enter(PID, job, proc=tree.proc)
    (tree.own / file).write_text(value + "\n")
    with pytest.raises(NotPermittedError, match=file):
        cgroup_limits.check_may_enter(PID, job, proc=tree.proc)


@pytest.mark.parametrize(("of_job", "may"), [("50", True), ("51", False), ("max", False)])
def test_who_enters_a_job_keeps_the_limit_on_tasks(tree: Tree, of_job: str, may: bool) -> None:
    job = tree.top / "infiniswap_run_4711_99.slice"
    job.mkdir()
    (job / "pids.max").write_text(f"{of_job}\n")
    (tree.own / "pids.max").write_text("50\n")
    with contextlib.nullcontext() if may else pytest.raises(NotPermittedError, match=r"pids\.max"):
        cgroup_limits.check_may_enter(PID, job, proc=tree.proc)


@pytest.mark.parametrize("name", ["memory.memsw.limit_in_bytes", "memory.kmem.limit_in_bytes"])
def test_a_version_1_swap_limit_must_not_be_escaped(tmp_path: Path, name: str) -> None:
    tree = Tree(tmp_path, "job")
    for who in ("self", str(PID)):
        (tree.proc / who / "cgroup").write_text("4:memory:/job\n")
        (tree.proc / who / "mountinfo").write_text(
            f"1 0 0:1 / {tree.top} rw - cgroup cgroup rw,memory\n"
        )
    file = tree.own / name
    file.write_text("9223372036854771712\n")
    cgroup_limits.check_leaves_no_limit(PID, tree.top, proc=tree.proc)
    file.write_text("1048576\n")
    with pytest.raises(NotPermittedError, match=name):
        cgroup_limits.check_leaves_no_limit(PID, tree.top, proc=tree.proc)


@pytest.mark.parametrize("name", ["x.slice", "infiniswap_run_1.slice", "infiniswap_run_a_b.slice"])
def test_other_slices_are_not_ours(tree: Tree, name: str) -> None:
    (tree.top / name).mkdir()
    assert find_job_cgroups(proc=tree.proc) == ()
    assert SliceCgroup(tree.top / name, 2).name == name
