# SPDX-License-Identifier: Apache-2.0
"""What a service inherits, on made-up cgroups and by processes of its own; tests/vm has swap."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.machine.made_groups import CONTAINER_ROOT, PID, MadeGroups

from infiniswap.errors import MemoryLimitError, UnavailableError
from infiniswap.system import systemd
from infiniswap.system.surroundings import in_force, leave, limits
from infiniswap.system.surroundings.groups import foreign_groups, frozen_by, is_in_unit
from infiniswap.system.surroundings.kills import KillWatch
from infiniswap.units import GIB, MIB

V1 = ("memory", "pids", "freezer", "cpu", "name=systemd")
STEP = "/slurm/uid_0/job_7/step_0"


@pytest.fixture
def v2(tmp_path: Path) -> MadeGroups:
    return MadeGroups(tmp_path)


@pytest.fixture
def v1(tmp_path: Path) -> MadeGroups:
    return MadeGroups(tmp_path, *V1)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, started nice, idle, and with limits."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "has_bus", lambda: False)


# ------------------------------------------------------------------------------ cgroups


def test_a_steps_cgroups_of_version_1_are_all_left(
    v1: MadeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_systemd(monkeypatch)
    v1.put(PID, {"memory": STEP, "pids": STEP, "freezer": STEP})
    leave.settle(PID, "x", proc=v1.proc)
    assert v1.moved_to() == ["freezer", "memory", "pids"]
    assert (v1.root / "freezer" / "cgroup.procs").read_text() == str(PID)


def test_a_session_of_version_2_is_left_without_systemd(
    v2: MadeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_systemd(monkeypatch)
    v2.put(PID, {"": "/user.slice/user-0.slice/session-3.scope"})
    leave.settle(PID, "x", proc=v2.proc)
    assert v2.moved_to() == ["."]


@pytest.mark.parametrize(
    "path",
    [
        "/user.slice/user-1000.slice/session-3.scope",
        "/user.slice/user-0.slice/user@0.service/app.slice/vte-spawn-1.scope",
        "/user.slice/user-0.slice/user@0.service",
        "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
    ],
)
def test_systemd_makes_a_scope_for_what_begins_in_a_session(
    v2: MadeGroups, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked: list[Sequence[str]] = []

    def busctl(argv: Sequence[str], **_more: object) -> str:
        asked.append(argv)
        v2.put(PID, {"": "/system.slice/isw-x.scope"})
        return ""

    monkeypatch.setattr(systemd, "has_bus", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(systemd, "run_command", busctl)
    v2.put(1, {"": "/init.scope"})
    v2.put(PID, {"": path})
    leave.settle(PID, "isw-x", proc=v2.proc)
    assert len(asked) == 1
    words = " ".join(asked[0])
    assert f"PIDs au 1 {PID}" in words
    assert "SendSIGKILL b false" in words
    assert v2.moved_to() == []


def test_what_systemd_does_not_manage_is_left_as_well(
    v1: MadeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The freezer, which systemd knows nothing of, beside controllers that its scope has."""

    def busctl(argv: Sequence[str], **_more: object) -> str:
        unit = "/system.slice/x.scope"
        paths = {"name=systemd": unit, "memory": unit, "pids": "/system.slice", "freezer": STEP}
        v1.put(PID, paths)
        return ""

    monkeypatch.setattr(systemd, "has_bus", lambda: True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(systemd, "run_command", busctl)
    v1.put(PID, dict.fromkeys(("name=systemd", "memory", "freezer"), STEP))
    leave.settle(PID, "x", proc=v1.proc)
    assert v1.moved_to() == ["freezer"]


@pytest.mark.parametrize("path", ["/system.slice/own.service", "/system.slice/docker-ab12.scope"])
def test_a_units_own_cgroup_is_never_left(
    v2: MadeGroups, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(systemd, "has_bus", lambda: pytest.fail("systemd was asked"))
    v2.put(1, {"": "/init.scope"})
    v2.put(PID, {"": path})
    leave.settle(PID, "x", proc=v2.proc)
    assert is_in_unit(PID, proc=v2.proc)
    assert v2.moved_to() == []


def test_what_a_service_manager_has_started_stays(v2: MadeGroups) -> None:
    v2.put(PID, {"": "/some/where"})
    leave.settle(PID, "x", managed=True, proc=v2.proc)
    assert v2.moved_to() == []


def test_a_container_that_sees_the_hosts_cgroups_is_not_left(
    v2: MadeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where process 1 is its own nor where it is the host's."""
    no_systemd(monkeypatch)
    v2.put(PID, {"": "/docker/ab12"})
    v2.mounts(CONTAINER_ROOT)
    leave.settle(PID, "x", proc=v2.proc)
    v2.put(1, {"": "/docker/ab12"})
    leave.settle(PID, "x", proc=v2.proc)
    assert v2.moved_to() == []
    assert foreign_groups(PID, proc=v2.proc) == ()


def test_frozen_is_seen_in_every_cgroup_above(v1: MadeGroups, tmp_path: Path) -> None:
    (v1.proc / str(PID) / "stat").write_text(f"{PID} (a) b) S 1\n")
    v1.put(PID, {"freezer": "/a/b"})
    assert frozen_by(PID, proc=v1.proc) == ("", "")
    v1.write("freezer/a", freezer__self_freezing=1)
    why, mend = frozen_by(PID, proc=v1.proc)
    assert "freezer/a is frozen" in why
    assert "echo THAWED > " in mend
    other = MadeGroups(tmp_path / "v2")
    other.put(PID, {"": "/a/b"})
    other.write("a", cgroup__freeze=1, cgroup__events="populated 1\nfrozen 1")
    assert "echo 0 > " in frozen_by(PID, proc=other.proc)[1]


def test_a_stopped_process_is_told_apart(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert frozen_by(child.pid) == (
        "it is stopped by a signal or a debugger",
        f"Run: kill -CONT {child.pid}.",
    )


# ---------------------------------------------------------------------- limits, priority


def test_niceness_idleness_and_soft_limits_are_taken_off(child: subprocess.Popen[bytes]) -> None:
    os.setpriority(os.PRIO_PROCESS, child.pid, 9)
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
    resource.prlimit(child.pid, resource.RLIMIT_CPU, (50, resource.RLIM_INFINITY))
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (50, 5000))
    before = os.sched_getaffinity(child.pid)
    subprocess.run(["ionice", "-c", "3", "-p", str(child.pid)], check=True)
    leave.settle(child.pid, "x")
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == 0 or os.geteuid() != 0
    assert os.sched_getscheduler(child.pid) == os.SCHED_OTHER
    assert resource.prlimit(child.pid, resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY
    assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE) == (5000, 5000)
    assert os.sched_getaffinity(child.pid) == before
    shown = subprocess.check_output(["ionice", "-p", str(child.pid)], text=True)
    assert "idle" not in shown


def in_child(body: Callable[[], None], limit: int, value: int) -> str:
    """What an error says, in a process with that hard limit."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        text = ""
        try:
            resource.setrlimit(limit, (value, value))
            body()
        except UnavailableError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    ("limit", "value", "figures"),
    [
        (resource.RLIMIT_CPU, 900, ("900 s", "unlimited", "-t")),
        (resource.RLIMIT_FSIZE, 3 * MIB, ("3.00 MiB", "8.00 MiB", "-f")),
        (resource.RLIMIT_DATA, 900 * MIB, ("900 MiB", "1.00 GiB", "-d")),
    ],
)
def test_a_hard_limit_that_is_too_low_is_refused_with_figures(
    limit: int, value: int, figures: tuple[str, ...]
) -> None:
    def check() -> None:
        limits.check_ulimits(file_bytes=8 * MIB, memory_bytes=GIB)

    said = in_child(check, limit, value)
    assert all(figure in said for figure in figures), said


def test_limits_of_every_cgroup_above_are_compared(v2: MadeGroups) -> None:
    """The standby's memory must fit beside what is used already; page cache counts as free."""
    v2.put(PID, {"": "/box/leaf"})
    v2.memory("box/leaf", GIB, 100 * MIB)
    v2.memory("box", 192 * MIB, 120 * MIB)
    v2.status(anon_mib=80, shared_mib=20)
    limits.check_room(PID, 0, proc=v2.proc)
    with pytest.raises(MemoryLimitError) as refused:
        limits.check_room(PID, 1, proc=v2.proc)
    said = str(refused.value)
    assert f"{v2.root}/box: " in said
    assert "2 processes of the device need 196 MiB" in said
    assert "may have 192 MiB, of which other processes have 20.0 MiB" in said


def test_memory_high_counts_as_a_limit(v2: MadeGroups) -> None:
    v2.put(PID, {"": "/box"})
    v2.memory("box", GIB, 100 * MIB)
    v2.write("box", memory__high=110 * MIB)
    v2.status(anon_mib=80)
    with pytest.raises(MemoryLimitError, match="may have 110 MiB"):
        limits.check_room(PID, 1, proc=v2.proc)


def test_a_limit_on_threads_is_compared(v2: MadeGroups) -> None:
    v2.put(PID, {"": "/box/leaf"})
    v2.write("box", pids__max=30, pids__current=14)
    v2.status(anon_mib=80, threads=12)
    limits.check_room(PID, 0, proc=v2.proc)
    with pytest.raises(UnavailableError, match="need 40 threads, and this cgroup may have 30"):
        limits.check_room(PID, 1, proc=v2.proc)


def test_what_stays_in_force_is_named(v2: MadeGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    v2.put(PID, {"": "/box"})
    v2.memory("box", GIB, 100 * MIB)
    v2.write("box", pids__max=30, pids__current=14, cpu__max="50000 100000")
    (v2.proc / str(PID) / "cgroup").write_text("0::/box\n")
    said = "\n".join(map(str, in_force.in_force(PID, proc=v2.proc)))
    assert f"starter: process {PID} is in {v2.root}/box" in said
    assert "may have 1.00 GiB of memory, of which 924 MiB are free" in said
    assert "may have 30 threads, of which 14" in said
    assert "may use 0.5 processors" in said


def test_processors_and_niceness_that_stay_are_named(child: subprocess.Popen[bytes]) -> None:
    os.setpriority(os.PRIO_PROCESS, child.pid, 0)  # whatever that of these tests is
    assert in_force.of_process(child.pid) == ()
    os.setpriority(os.PRIO_PROCESS, child.pid, 9)
    os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})
    said = "\n".join(map(str, in_force.of_process(child.pid)))
    assert "nice 9" in said
    assert (f"1 of {os.cpu_count()} processors" in said) == ((os.cpu_count() or 1) > 1)


def test_a_shell_that_is_left_counts_for_nothing_in_doctor(v2: MadeGroups) -> None:
    v2.put(PID, {"": "/box"})
    v2.memory("box", GIB, 100 * MIB)
    assert in_force.would_stay(PID, leaves=True, proc=v2.proc) == ()
    assert in_force.would_stay(PID, leaves=False, proc=v2.proc) != ()


def test_a_kill_for_a_memory_limit_names_the_cgroup(v2: MadeGroups) -> None:
    v2.put(PID, {"": "/box/leaf"})
    v2.memory("box/leaf", 8 * GIB, 0, kills=3).joinpath("memory.max").write_text("max\n")
    v2.memory("box", 192 * MIB, 0, kills=3)
    watch = KillWatch(PID, proc=v2.proc)
    assert watch.cause() == ""
    v2.memory("box", 192 * MIB, 0, kills=4)
    assert watch.cause() == f"the memory limit of {v2.root}/box (192 MiB)"
