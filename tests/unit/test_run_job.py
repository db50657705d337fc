# SPDX-License-Identifier: Apache-2.0
"""Commands, signals and waiting, and which cgroup is whose; tests/system has the real jobs."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.machine.stopping import stopped

from infiniswap.device.jobs import job
from infiniswap.device.process import runs
from infiniswap.errors import NotFoundError, SystemCallError
from infiniswap.system.cgroup import RUN_PREFIX, MemoryCgroup
from infiniswap.system.process import pidfd_ended
from infiniswap.system.signals import poll, take_pending

# ------------------------------------------------------------------------- command


def test_commands_are_looked_for_before_anything_is_set_up(tmp_path: Path) -> None:
    job.check_command(["sh"], None)
    job.check_command([sys.executable], None)
    plain = tmp_path / "plain"
    plain.write_text("")
    for name, kind in (
        ("no-such-command-xyz", job.CommandNotFoundError),
        (str(tmp_path / "nothing"), job.CommandNotFoundError),
        (str(plain), job.CommandNotExecutableError),
        (str(tmp_path), job.CommandNotExecutableError),
    ):
        with pytest.raises(kind):
            job.check_command([name], None)


def test_exit_codes_are_those_of_shells() -> None:
    assert job.CommandNotFoundError.exit_code == 127
    assert job.CommandNotExecutableError.exit_code == 126


def test_signals_are_blocked_and_what_was_for_the_job_is_dropped() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with job.block_signals() as signals:
        assert signals.mask == before
        assert signal.SIGTERM in signals.taken
        # To this thread: pytest's process may have others (an executor's), which do not block it.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert signal.SIGTERM in signal.sigpending()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_an_ignored_signal_is_left_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with job.block_signals() as signals:
            assert signal.SIGHUP not in signals.taken
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_job_that_cannot_enter_its_cgroup_says_why(tmp_path: Path) -> None:
    cgroup = MemoryCgroup(tmp_path / "gone", 2)
    with job.block_signals() as signals, pytest.raises(SystemCallError, match="No such file"):
        job.start(["true"], cgroup, None, signals)


def test_a_job_is_waited_for_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    cgroup = MemoryCgroup(tmp_path, 2)
    ticks: list[None] = []
    with job.block_signals() as signals:
        process = job.start(["sh", "-c", "exit 7"], cgroup, None, signals)
        result = job.wait(process, cgroup, signals, lambda: ticks.append(None))
    assert result.exit_code == 7
    assert result.elapsed_s > 0
    assert ticks


WAITER = """
import sys
from pathlib import Path
from infiniswap.device.jobs import job
from infiniswap.system.cgroup import MemoryCgroup
cgroup = MemoryCgroup(Path(sys.argv[1]), 2)
with job.block_signals() as signals:
    process = job.start(["sh", "-c", "read line; exit 7"], cgroup, None, signals)
    print("started", flush=True)
    result = job.wait(process, cgroup, signals, lambda: None)
print(result.exit_code)
"""


def test_a_run_that_is_stopped_for_long_and_continued_goes_on_waiting(tmp_path: Path) -> None:
    """SIGSTOP for longer than a sample takes, as by a batch scheduler or a debugger."""
    (tmp_path / "cgroup.procs").write_text("")
    argv = [sys.executable, "-c", WAITER, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiter:
        assert waiter.stdin is not None
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == b"started\n"
        for _ in range(3):
            with stopped(waiter.pid):
                time.sleep(0.3)
            time.sleep(0.1)  # it waits again
        try:
            out, _ = waiter.communicate(b"a line\n", 60)
        finally:
            waiter.kill()
    assert out == b"7\n"


def test_a_signal_wakes_the_wait_and_is_taken_once() -> None:
    with job.block_signals() as signals:
        assert poll({signals.fd: select.POLLIN}, 0) == {}
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert poll({signals.fd: select.POLLIN}, 60) == {signals.fd: select.POLLIN}
        info = take_pending(signals.taken)
        assert info is not None
        assert info.si_signo == signal.SIGUSR1
        assert take_pending(signals.taken) is None


# ---------------------------------------------------------------------------- runs


def test_a_runs_cgroup_has_a_name_that_no_other_run_ever_has() -> None:
    name = runs.cgroup_name(os.getpid())
    assert name == runs.cgroup_name(os.getpid())
    assert name.startswith(f"{RUN_PREFIX}{os.getpid()}-")
    with pytest.raises(NotFoundError):
        runs.cgroup_name(1 << 22)


def test_cgroups_of_runs_that_have_ended_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    zombie = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE)
    own, dying = runs.cgroup_name(os.getpid()), runs.cgroup_name(zombie.pid)
    ended.communicate()
    names = [own, dying, f"{RUN_PREFIX}{os.getpid()}-1", f"{RUN_PREFIX}x", RUN_PREFIX]
    found = tuple(MemoryCgroup(Path("/no") / name, 1) for name in names)
    monkeypatch.setattr(runs, "find_job_cgroups", lambda: found)

    def abandoned() -> list[str]:
        return [cgroup.name for cgroup in runs.abandoned_cgroups()]

    assert abandoned() == names[2:]
    pidfd = os.pidfd_open(zombie.pid)
    assert zombie.stdin is not None
    zombie.stdin.close()
    assert pidfd_ended(pidfd, 60.0)  # ended, and nobody has waited for it yet
    assert abandoned() == names[1:]
    zombie.wait()
    os.close(pidfd)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


def cgroup_of(run: str, failures: int = 0) -> Mock:
    """Of a run; it cannot be ended the first times."""
    cgroup = Mock(spec=MemoryCgroup)
    cgroup.name = run
    cgroup.kill.side_effect = [*[SystemCallError("not yet")] * failures, None]
    return cgroup


@pytest.mark.parametrize("failures", [0, 2])
async def test_the_job_of_a_killed_run_is_ended_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(runs, "CLEAN_PAUSE_S", 0.001)
    processes = [sleeper(), sleeper()]
    names = [*(runs.cgroup_name(process.pid) for process in processes), f"{RUN_PREFIX}1-1"]
    cgroups = tuple(cgroup_of(name, failures) for name in names)
    changed = asyncio.Event()
    with ThreadPoolExecutor(1) as executor:
        watched = runs.Runs(executor, changed.set, lambda: cgroups)
        try:
            for process in processes:
                watched.join(process.pid)
                watched.join(process.pid)  # again, which is nothing new
            assert watched.pids() == sorted(process.pid for process in processes)
            processes[0].kill()
            await asyncio.wait_for(changed.wait(), 60)
            assert [cgroup.kill.call_count for cgroup in cgroups] == [failures + 1, 0, 0]
            assert (watched.pids(), watched.idle) == ([processes[1].pid], False)
            watched.leave(processes[1].pid)
            watched.leave(processes[1].pid)
            assert watched.idle
            assert not cgroups[1].kill.called  # it has left in order
        finally:
            for process in processes:
                process.kill()
                process.wait()
            await watched.close()


@dataclass(frozen=True, slots=True)
class Living(MemoryCgroup):
    """A cgroup without a kernel: those of its processes that live are in it."""

    processes: tuple[subprocess.Popen[bytes], ...]

    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self.processes if process.poll() is None)


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Living]:
    """A member's job, with one program that has become root's."""
    users = (65534, 0, 65534)
    processes = tuple(subprocess.Popen(["sleep", "1000"], user=user) for user in users)
    made = Living(tmp_path / f"{RUN_PREFIX}1-1", 1, processes)
    made.path.mkdir()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.mark.requires_root
def test_a_members_job_that_became_roots_is_left_running(mixed: Living) -> None:
    """As after `sudo`: the member may not end it, so the device does not do so for the member."""
    roots = mixed.processes[1]
    assert mixed.kill_of(65534) == (roots.pid,)
    assert mixed.pids() == (roots.pid,)
    assert runs.end_job(mixed, 65534) == (roots.pid,)
    assert mixed.path.is_dir()
    roots.kill()
    roots.wait()
    assert runs.end_job(mixed, 65534) == ()
    assert not mixed.path.exists()


@pytest.mark.requires_root
async def test_after_a_killed_run_a_program_of_roots_stays(
    mixed: Living, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Also where a successor of the process that watched the run cleans up."""
    monkeypatch.setattr(runs, "LEFT_PAUSE_S", 0.001)
    roots, run, records = mixed.processes[1], sleeper(), tmp_path / "runs"
    monkeypatch.setattr(runs, "cgroup_name", lambda _pid: mixed.path.name)
    changed = asyncio.Event()
    with ThreadPoolExecutor(1) as executor:
        watched = runs.Runs(executor, changed.set, lambda: (mixed,), records)
        watched.join(run.pid, 65534)
        run.kill()
        run.wait()
        await asyncio.to_thread(lambda: [mixed.processes[i].wait(60) for i in (0, 2)])
        await asyncio.wait_for(watched.close(), 60)
        assert f"process {roots.pid} (sleep) has the rights of another user" in caplog.text
        assert caplog.text.count(f"run {run.pid}") == 1  # nothing says that it is done
        monkeypatch.setattr(runs, "cgroup_name_or_none", lambda _pid: None)  # it has ended
        successor = runs.Runs(executor, changed.set, lambda: (mixed,), records)
        successor.watch_again()
        await asyncio.sleep(0.05)
        assert roots.poll() is None
        roots.kill()
        roots.wait()
        changed.clear()
        await asyncio.wait_for(changed.wait(), 60)
        assert (mixed.path.exists(), list(records.iterdir())) == (False, [])
        assert "what was left of its job is gone now" in caplog.text


async def test_a_run_that_does_not_exist_cannot_join() -> None:
    with ThreadPoolExecutor(1) as executor:
        watched = runs.Runs(executor, lambda: None, tuple)
        with pytest.raises(NotFoundError):
            watched.join(1 << 22)
        assert watched.idle


async def test_closing_waits_for_a_clean_up_under_way() -> None:
    process = sleeper()
    cgroup = cgroup_of(runs.cgroup_name(process.pid))
    with ThreadPoolExecutor(1) as executor:
        watched = runs.Runs(executor, lambda: None, lambda: (cgroup,))
        watched.join(process.pid)
        process.kill()
        process.wait()
        await asyncio.sleep(0)  # the loop looks at its descriptors
        await asyncio.sleep(0)
        assert not watched.pids()
        await watched.close()
        cgroup.kill.assert_called_once()
