# SPDX-License-Identifier: Apache-2.0
"""Processes: pidfds, and what makes a process safe to serve swap."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infiniswap import rights
from infiniswap.errors import (
    NotFoundError,
    SystemCallError,
    from_oserror,
)
from infiniswap.system.files import PROC, read_text, try_read_text

PF_IO_FLUSHER = 0x0008_0000
"""Bit of `flags` in /proc/PID/task/TID/stat that PR_SET_IO_FLUSHER sets (PF_MEMALLOC_NOIO)."""

PAGE_THREAD_PREFIX = "isw-"
"""Names of the C library's threads, all of which are on the page path, start with this."""

OOM_SCORE_ADJ_NEVER = -1000

_NICE = 10
_PR_SET_IO_FLUSHER = 57
_REALTIME_POLICIES = (os.SCHED_FIFO, os.SCHED_RR)
_URGENT_THREADS = ("isw-backup", "isw-ublk", "isw-fuse", "isw-nbd-conn", "isw-nbd-send")
"""Those that call iswi_thread_urgent (csrc/util/util.h)."""
_MCL_CURRENT = 1
_MCL_FUTURE = 2


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# ------------------------------------------------------------------------ pidfds


def pidfd_open(pid: int) -> int:
    """A descriptor for the process; it cannot come to mean another one. The caller closes it.

    Raises:
        NotFoundError: no such process.
        SystemCallError: the kernel's refusal.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise NotFoundError(f"there is no process {pid}") from error
    except OSError as error:
        raise from_oserror(f"cannot watch process {pid}", error) from error


def pidfd_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether the process has ended, waiting at most `timeout_s` seconds for it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0, int(timeout_s * 1000))))


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end of a Unix socket, as it was when it connected
    (SO_PEERCRED, unix(7)): the kernel's word, not the peer's."""
    credentials = struct.Struct("3i")  # struct ucred
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid, uid, _gid = credentials.unpack(data)
    return pid, uid


def pidfd_signal(pidfd: int, number: signal.Signals) -> bool:
    """Sends a signal; False when the process is gone.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise from_oserror(f"cannot send {number.name}", error) from error
    return True


def end_process(pid: int, *, term_s: float, kill_s: float = 5.0) -> bool:
    """SIGTERM, then after `term_s` seconds SIGKILL. True when the process is gone.

    A child of the caller counts as gone when it is a zombie; the caller still waits for it.
    """
    try:
        pidfd = pidfd_open(pid)
    except NotFoundError:
        return True
    try:
        for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            if not pidfd_signal(pidfd, number) or pidfd_ended(pidfd, wait_s):
                return True
        return False
    finally:
        os.close(pidfd)


# ------------------------------------------------------------------------- cores


def leave_no_core(*, proc: Path = PROC) -> None:
    """This process and its children leave no core file: it would hold pages and keys of others.

    A limit of 1 also turns off a program that the kernel would pipe the core to; 0 does not
    (core(5)). Where the limit is 0 already and may not be raised, what is piped has no memory in
    it: no kind of mapping is left in the core's filter.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    with contextlib.suppress(OSError):
        (proc / "self" / "coredump_filter").write_text("0\n")


# ------------------------------------------------------------------- swap safety


@dataclass(frozen=True, slots=True)
class Degraded:
    """Something that should be and is not, though the process can go on without it.

    Attributes:
        name: short and stable, for `status --json`: "memory-lock", "oom-score", "io-flusher",
            "realtime".
        reason: what happened, one sentence.
        mend: the remedy.
    """

    name: str
    reason: str
    mend: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason.rstrip('.')}. {self.mend}"


def sentences(outcomes: Iterable[Degraded]) -> list[str]:
    """One for each, and a remedy that several of them share only once."""
    told: dict[str, str] = {}
    found = []
    for outcome in outcomes:
        first = told.setdefault(outcome.mend, outcome.name)
        mend = outcome.mend if first == outcome.name else f"The remedy is that of {first}."
        found.append(str(Degraded(outcome.name, outcome.reason, mend)))
    return found


_MEND_CAPABILITY = "Run it as root with CAP_SYS_RESOURCE (the shipped systemd unit has it)."


def _mend(capability: str) -> str:
    """For what the calling process was refused."""
    return f"{rights.mend(capability)} The shipped systemd unit has what it takes."


def lock_memory() -> Degraded | None:
    """mlockall(MCL_CURRENT | MCL_FUTURE): nothing of this process is ever paged out.

    To be called when threads, buffers and connections exist, as all that comes later is locked
    when it is mapped, and a refusal then would be an allocation failure.
    """
    if _libc().mlockall(_MCL_CURRENT | _MCL_FUTURE) == 0:
        return None
    reason = os.strerror(ctypes.get_errno())
    return Degraded(
        "memory-lock",
        f"the process's memory could not be locked ({reason}); it may be swapped out itself, and "
        "then wait for its own pages",
        f"{rights.mend('CAP_IPC_LOCK')} Or raise the memlock limit (ulimit -l).",
    )


def set_oom_score_adj(value: int, pid: int | None = None, *, proc: Path = PROC) -> Degraded | None:
    """How readily the kernel kills the process when memory runs out: -1000 never, 1000 first."""
    path = proc / ("self" if pid is None else str(pid)) / "oom_score_adj"
    try:
        path.write_text(f"{value}\n")
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        return Degraded(
            "oom-score",
            f"oom_score_adj could not be set to {value} ({reason}); the kernel may kill the "
            "process that serves the swap space",
            _mend("CAP_SYS_RESOURCE"),
        )
    return None


def set_io_flusher() -> Degraded | None:
    """PR_SET_IO_FLUSHER on the calling thread (the C library does it on its own threads).

    Threads and children that it starts afterwards inherit it, as they do the OOM score.
    """
    if _libc().prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0) == 0:
        return None
    reason = os.strerror(ctypes.get_errno())
    return Degraded(
        "io-flusher",
        f"threads could not be marked as I/O flushers ({reason}); under global memory pressure "
        "they may wait for the very writes they have to make",
        _mend("CAP_SYS_RESOURCE"),
    )


def make_ordinary(score: int) -> None:
    """For a child that needs no favour: gives up what it has inherited from a page-path thread, as
    far as it may.

    Args:
        score: its OOM score adjustment.
    """
    set_oom_score_adj(score)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    _libc().prctl(_PR_SET_IO_FLUSHER, 0, 0, 0, 0)


def be_nice() -> None:
    """The calling thread gives way to everything else that the host has to do (Linux: each thread
    has its own niceness). Work that nobody waits for runs in such threads: the host must not feel
    that it lends."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


def make_swap_safe() -> tuple[Degraded, ...]:
    """Does all of the above for this process and thread. Returns what the kernel refused, also to
    the page-path threads, which ask for themselves."""
    outcomes: tuple[Degraded | None, ...] = (
        set_oom_score_adj(OOM_SCORE_ADJ_NEVER),
        set_io_flusher(),
        lock_memory(),
    )
    pid = os.getpid()
    outcomes += (_waiting(pid, _threads(PROC / str(pid) / "task")),)
    return tuple(outcome for outcome in outcomes if outcome is not None)


@dataclass(frozen=True, slots=True)
class ThreadSafety:
    """One thread: its name, whether PR_SET_IO_FLUSHER is in force, and a real-time policy."""

    tid: int
    name: str
    io_flusher: bool
    realtime: bool


@dataclass(frozen=True, slots=True)
class SwapSafety:
    """What /proc says of a process that serves swap.

    Attributes:
        pid: the process.
        locked_bytes: VmLck.
        resident_bytes: VmRSS.
        oom_score_adj: -1000 is wanted.
        threads: every thread.
        degraded: what is not as it should be; empty is good.
    """

    pid: int
    locked_bytes: int
    resident_bytes: int
    oom_score_adj: int
    threads: tuple[ThreadSafety, ...]
    degraded: tuple[Degraded, ...]


def parse_thread_stat(text: str) -> tuple[str, int, int]:
    """Name, flags and scheduling policy from the text of /proc/PID/task/TID/stat.

    Raises:
        SystemCallError: not such a text.
    """
    # The name may hold spaces and parentheses, so the last one counts.
    start, end = text.find("("), text.rfind(")")
    fields = text[end + 1 :].split()
    if not 0 < start < end or len(fields) < 39 or not fields[6].isdecimal():
        raise SystemCallError("not the text of a thread's stat file")
    policy = int(fields[38]) if fields[38].isdecimal() else 0
    return text[start + 1 : end], int(fields[6]), policy


def may_end(uid: int, pid: int, *, proc: Path = PROC) -> bool | None:
    """Whether the kernel lets this user end a process (kill(2): by its real or saved user); None:
    there is no such process."""
    users = status_fields(try_read_text(proc / str(pid) / "status") or "", "Uid")
    return str(uid) in (users[0], users[2]) if len(users) == 4 else None


def named(pid: int, *, proc: Path = PROC) -> str:
    """A process by its number and name, for a sentence: `4711 (sleep)`."""
    name = (try_read_text(proc / str(pid) / "comm") or "?").strip()
    return f"{pid} ({''.join(letter if letter.isprintable() else '?' for letter in name)})"


def status_fields(text: str, key: str) -> list[str]:
    """What stands behind a key of /proc/PID/status."""
    found = (line.partition(":") for line in text.splitlines())
    return next((rest.split() for name, _, rest in found if name == key), [])


def _status_kib(text: str, key: str) -> int:
    fields = status_fields(text, key)
    return int(fields[0]) if fields and fields[0].isdecimal() else 0


def _threads(task: Path) -> tuple[ThreadSafety, ...]:
    threads: list[ThreadSafety] = []
    with contextlib.suppress(OSError):
        for directory in sorted(task.iterdir()):
            text = try_read_text(directory / "stat")
            if text is None:  # ended meanwhile
                continue
            name, flags, policy = parse_thread_stat(text)
            flusher, realtime = bool(flags & PF_IO_FLUSHER), policy in _REALTIME_POLICIES
            threads.append(ThreadSafety(int(directory.name), name, flusher, realtime))
    return tuple(threads)


def _waiting(pid: int, threads: tuple[ThreadSafety, ...]) -> Degraded | None:
    names = [
        thread.name
        for thread in threads
        if thread.name.startswith(_URGENT_THREADS) and not thread.realtime
    ]
    if not names:
        return None
    return Degraded(
        "realtime",
        f"threads of process {pid} have no real-time priority: {', '.join(names)}; without it the "
        "kernel gives them none of its last memory, and when all is used up they may wait for "
        "memory that only they could free",
        _mend("CAP_SYS_NICE"),
    )


def swap_safety_report(pid: int, *, proc: Path = PROC) -> SwapSafety:
    """Reads back whether a process keeps the rules for serving swap.

    Raises:
        NotFoundError: no such process.
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    directory = proc / str(pid)
    if not directory.is_dir():
        raise NotFoundError(f"there is no process {pid}")
    status = read_text(directory / "status", "cannot read the process's memory figures")
    locked_bytes = _status_kib(status, "VmLck") * 1024
    resident_bytes = _status_kib(status, "VmRSS") * 1024
    score = int(read_text(directory / "oom_score_adj", "cannot read the OOM score"))
    threads = _threads(directory / "task")
    plain = [
        thread.name
        for thread in threads
        if thread.name.startswith(PAGE_THREAD_PREFIX) and not thread.io_flusher
    ]
    found = (
        (
            # Keys are locked by themselves, so a little is even where the rest was refused.
            locked_bytes < resident_bytes // 2,
            "memory-lock",
            f"process {pid} has only {locked_bytes // 1024} of {resident_bytes // 1024} KiB of its "
            "memory locked",
        ),
        (
            score != OOM_SCORE_ADJ_NEVER,
            "oom-score",
            f"oom_score_adj of process {pid} is {score}, not {OOM_SCORE_ADJ_NEVER}: the kernel may "
            "kill it when memory runs out",
        ),
        (
            bool(plain),
            "io-flusher",
            f"threads of process {pid} are not marked as I/O flushers: {', '.join(plain)}",
        ),
    )
    degraded = [Degraded(name, why, _MEND_CAPABILITY) for is_so, name, why in found if is_so]
    if (waiting := _waiting(pid, threads)) is not None:
        degraded.append(waiting)
    return SwapSafety(pid, locked_bytes, resident_bytes, score, threads, tuple(degraded))


def _stat_numbers(stat: Path, *wanted: int) -> tuple[int, ...] | None:
    """Fields of a stat file, counted from the one after the name (which may hold anything)."""
    text = try_read_text(stat) or ""
    fields = text[text.rfind(")") + 1 :].split()
    return tuple(int(fields[field]) for field in wanted) if len(fields) > max(wanted) else None


def _stat_number(pid: int, field: int, proc: Path) -> int | None:
    numbers = _stat_numbers(proc / str(pid) / "stat", field)
    return None if numbers is None else numbers[0]


def start_time(pid: int, *, proc: Path = PROC) -> int | None:
    """Start time of a process in clock ticks since boot; with the pid it names a process for
    good. None when there is no such process."""
    return _stat_number(pid, 19, proc)


def cpu_ticks(stat: Path) -> int | None:
    """Processor time so far, in clock ticks, by the stat file of a process or thread; None when
    that has ended."""
    times = _stat_numbers(stat, 11, 12)
    return None if times is None else sum(times)


def parent_pid(pid: int, *, proc: Path = PROC) -> int | None:
    """Pid of a process's parent; None when there is no such process."""
    return _stat_number(pid, 1, proc)


def process_uids(pid: int, *, proc: Path = PROC) -> frozenset[int]:
    """Every user whose rights a process has or could take: real, effective, saved, and of the
    file system. Empty when there is no such process."""
    text = try_read_text(proc / str(pid) / "status") or ""
    return frozenset(int(field) for field in status_fields(text, "Uid"))
