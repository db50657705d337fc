# SPDX-License-Identifier: Apache-2.0
"""Pidfds, and the report on what makes a process safe to serve swap."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.made_host import make_files

from infiniswap.errors import NotFoundError, SystemCallError
from infiniswap.system import process
from infiniswap.system.programs import run_command

PYTHON = sys.executable


def test_a_pidfd_tells_when_its_process_ends() -> None:
    child = subprocess.Popen([PYTHON, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = process.pidfd_open(child.pid)
    try:
        assert not process.pidfd_ended(pidfd)
        assert process.pidfd_signal(pidfd, signal.SIGKILL)
        assert process.pidfd_ended(pidfd, timeout_s=30)
        assert child.wait() == -signal.SIGKILL
        assert not process.pidfd_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
        child.communicate()


def test_end_process_kills_what_ignores_sigterm() -> None:
    script = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); input()"
    child = subprocess.Popen(
        [PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    assert process.end_process(child.pid, term_s=0.05)
    assert child.wait() == -signal.SIGKILL
    assert process.end_process(child.pid, term_s=0)
    child.communicate()


def stat_text(tid: int, name: str, flags: int, policy: int = os.SCHED_RR) -> str:
    """Fields as in proc_pid_stat(5): flags is the 9th, policy the 41st."""
    return f"{tid} ({name}) S 1 1 1 0 -1 {flags} {'0 ' * 31}{policy} 0 0"


@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=15),
    flags=st.integers(0, 2**32 - 1),
    policy=st.integers(0, 7),
)
def test_a_threads_name_can_hold_anything(name: str, flags: int, policy: int) -> None:
    assert process.parse_thread_stat(stat_text(42, name, flags, policy)) == (name, flags, policy)


@given(st.text())
def test_a_stat_file_of_another_form_is_an_error_not_a_crash(text: str) -> None:
    with contextlib.suppress(SystemCallError):
        process.parse_thread_stat(text)


def _fake_process(
    proc: Path,
    *,
    locked_kib: int,
    score: int,
    threads: dict[str, int],
    policy: int = os.SCHED_RR,
) -> None:
    directory = proc / "77"
    memory = f"VmLck:\t{locked_kib:8} kB\nVmRSS:\t    4000 kB"
    status = f"Name:\tx\n{memory}\nThreads:\t{len(threads)}"
    make_files(directory, {"status": status, "oom_score_adj": score})
    for tid, (name, flags) in enumerate(threads.items(), start=77):
        make_files(directory, {f"task/{tid}/stat": stat_text(tid, name, flags, policy)})


def test_a_safe_process_has_nothing_degraded(tmp_path: Path) -> None:
    flags = process.PF_IO_FLUSHER | 0x40
    _fake_process(tmp_path, locked_kib=4800, score=-1000, threads={"python": 0, "isw-fuse": flags})
    report = process.swap_safety_report(77, proc=tmp_path)
    assert report.degraded == ()
    assert report.locked_bytes == 4800 * 1024
    assert report.resident_bytes == 4000 * 1024
    assert [(thread.name, thread.io_flusher) for thread in report.threads] == [
        ("python", False),
        ("isw-fuse", True),
    ]


def test_threads_that_free_memory_are_realtime(tmp_path: Path) -> None:
    names = ("isw-remote", "isw-backup-w0", "isw-ublk-0", "isw-nbd-conn")
    threads = {"python": 0, **dict.fromkeys(names, process.PF_IO_FLUSHER)}
    _fake_process(tmp_path, locked_kib=4800, score=-1000, threads=threads, policy=os.SCHED_OTHER)
    (item,) = process.swap_safety_report(77, proc=tmp_path).degraded
    assert item.name == "realtime"
    assert "isw-backup-w0, isw-ublk-0, isw-nbd-conn;" in item.reason
    assert "isw-remote" not in item.reason


@pytest.mark.parametrize("locked_kib", [0, 64])
def test_every_missing_safeguard_is_named(tmp_path: Path, locked_kib: int) -> None:
    """Also where only a key is locked, which takes care of itself."""
    _fake_process(tmp_path, locked_kib=locked_kib, score=0, threads={"python": 0, "isw-a b": 0x40})
    report = process.swap_safety_report(77, proc=tmp_path)
    assert [item.name for item in report.degraded] == ["memory-lock", "oom-score", "io-flusher"]
    assert "isw-a b" in report.degraded[2].reason
    assert all(item.mend for item in report.degraded)


def test_no_such_process(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="78"):
        process.swap_safety_report(78, proc=tmp_path)
    assert process.start_time(78, proc=tmp_path) is None


def test_a_refused_oom_score_is_a_named_degraded_state(tmp_path: Path) -> None:
    degraded = process.set_oom_score_adj(-1000, 5, proc=tmp_path)
    assert degraded is not None
    assert degraded.name == "oom-score"
    assert "-1000" in str(degraded)


def test_a_process_that_leaves_no_core_leaves_none_to_a_program_either() -> None:
    code = (
        "from infiniswap.system.process import leave_no_core; leave_no_core(); "
        "import resource; print(*resource.getrlimit(resource.RLIMIT_CORE), "
        "open('/proc/self/coredump_filter').read())"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "00000000"]


def test_the_start_time_names_a_process() -> None:
    child = subprocess.Popen([PYTHON, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mine, childs = process.start_time(os.getpid()), process.start_time(child.pid)
        assert mine is not None
        assert childs is not None
        assert mine <= childs
    finally:
        child.communicate()


@pytest.mark.parametrize("what", ["lock", "flusher"])
def test_safeguards_take_hold_or_are_named(what: str) -> None:
    """In a child, so that the test process itself stays as it is."""
    script = (
        "import os\n"
        "from infiniswap.system import process\n"
        f"refused = process.{'lock_memory' if what == 'lock' else 'set_io_flusher'}()\n"
        "report = process.swap_safety_report(os.getpid())\n"
        "print(refused is None, report.locked_bytes > 0, report.threads[0].io_flusher)\n"
    )
    out = run_command([PYTHON, "-c", script]).split()
    assert out[0] == out[1 if what == "lock" else 2]
