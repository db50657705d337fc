# SPDX-License-Identifier: Apache-2.0
"""The job of `infiniswap run`: a process in a memory cgroup, as the invoking user.

The runner stays root to undo everything; only the job's own process drops to the user that called
sudo, with that user's groups, environment and PATH, before it executes the command.

The job shares the runner's process group, so that pipelines, Ctrl-Z and `fg` work as they do
without the runner. What the terminal sends therefore reaches both; what a program sends to the
runner alone is handed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infiniswap.device.jobs.sudo import User, acting_as
from infiniswap.device.jobs.terminal import JobTerminal, open_terminal
from infiniswap.errors import (
    InfiniswapError,
    NotFoundError,
    SystemCallError,
)
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.signals import open_signalfd, poll, take_pending

_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGWINCH,
)
KILLED: Final = 128 + signal.SIGKILL
_SI_KERNEL: Final = 0x80
_SAMPLE_S_MIN: Final = 0.005
_SAMPLE_S_MAX: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_REASON_BYTES_MAX: Final = 4096


class CommandNotFoundError(NotFoundError):
    """The command does not exist; the exit code is that of shells, `env`, `nice` and `sudo`."""

    exit_code = 127


class CommandNotExecutableError(SystemCallError):
    """The command exists and cannot be executed; the exit code is that of shells."""

    exit_code = 126


def check_command(command: Sequence[str], user: User | None) -> None:
    """Finds a misspelt command before anything is set up; execution itself has the last word.

    Raises:
        CommandNotFoundError: there is no such file on the PATH, or at all.
        CommandNotExecutableError: the command exists, but cannot be executed.
    """
    path = (os.environ if user is None else user.environment).get("PATH", os.defpath)
    with acting_as(user):
        if shutil.which(command[0], path=path) is not None:
            return
        found = shutil.which(command[0], mode=os.F_OK, path=path)
        is_directory = bool(os.path.dirname(command[0])) and os.path.isdir(command[0])
    if is_directory:
        raise _not_executable(command[0], "it is a directory")
    if found is None:
        raise _not_found(command[0])
    raise _not_executable(command[0], "Permission denied")


def _not_found(name: str) -> CommandNotFoundError:
    return CommandNotFoundError(
        f"there is no command {name!r}", mend="Check the spelling and the PATH."
    )


def _not_executable(name: str, reason: str | None) -> CommandNotExecutableError:
    return CommandNotExecutableError(
        f"{name!r} cannot be executed: {reason}",
        mend="Check its permissions, and that it is a program or begins with `#!`.",
    )


# ------------------------------------------------------------------------ signals


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals that wait for `wait` to take them.

    Attributes:
        taken: blocked by us; what was ignored when the runner started (nohup) is not among them.
        mask: what was blocked before, and is in the job.
        fd: readable while one of `taken` is pending.
    """

    taken: frozenset[signal.Signals]
    mask: frozenset[int]
    fd: int

    def restore(self) -> None:
        """As before; what has arrived meanwhile was meant for the job and is dropped."""
        while take_pending(self.taken) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


@contextlib.contextmanager
def block_signals() -> Iterator[Signals]:
    """While this is open, `wait` takes the signals; before the job runs they stay pending."""
    taken = {number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}
    taken.add(signal.SIGCHLD)
    # Where it is ignored, as some supervisors leave it, the kernel forgets exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fd = open_signalfd(taken)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    signals = Signals(frozenset(taken), frozenset(mask), fd)
    try:
        yield signals
    finally:
        signals.restore()
        os.close(fd)


def _hand_on(
    info: signal.struct_siginfo,
    job_pid: int,
    cgroup: MemoryCgroup,
    terminal: JobTerminal | None,
    on_stop: Callable[[], None],
) -> None:
    number = signal.Signals(info.si_signo)
    if terminal is not None:
        if info.si_pid != os.getpid():
            terminal.hand_on(number, group=info.si_code == _SI_KERNEL)
        return
    if not _has_job_got(info, cgroup):
        with contextlib.suppress(ProcessLookupError):
            os.kill(job_pid, number)
    if number is signal.SIGTSTP:
        on_stop()
        # By its default action, not SIGSTOP: without a shell that could continue us the kernel
        # ignores it, for us as for the job.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _has_job_got(info: signal.struct_siginfo, cgroup: MemoryCgroup) -> bool:
    if info.si_code == _SI_KERNEL:
        # From the terminal, to the whole foreground process group; but a terminal that goes away
        # tells only the leader of its session.
        return not (info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid())
    # A job that signals its own process group reaches us, too.
    return info.si_code <= 0 and info.si_pid in cgroup.pids()


# ---------------------------------------------------------------------------- job


_ASAN_SECOND: Final = "verify_asan_link_order=0"
"""AddressSanitizer ends a program that has a library before its own, unless it is told this."""


@dataclass(frozen=True, slots=True)
class Preload:
    """A library for the programs of a job.

    Attributes:
        library: its path. A library that is in the job's LD_PRELOAD already comes after it.
        variables: of the environment, which the library reads.
        descriptors: that the job inherits, with their numbers.
    """

    library: str
    variables: Mapping[str, str]
    descriptors: tuple[int, ...]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The job's environment, made from that of its user."""
        first = {"LD_PRELOAD": self.library, "ASAN_OPTIONS": _ASAN_SECOND}
        lists = {name: ":".join(filter(None, (own, base.get(name)))) for name, own in first.items()}
        return {**base, **self.variables, **lists}


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: the command's, or 128 + N for signal N.
        elapsed_s: wall time.
        is_explained: it was ended by us, or why it was killed has been said.
    """

    exit_code: int
    elapsed_s: float
    is_explained: bool = False


@contextlib.contextmanager
def own_terminal(user: User | None) -> Iterator[JobTerminal | None]:
    """A terminal for a job that must not have ours; None where there is none, or it may have it.

    Raises:
        SystemCallError: it cannot be made.
    """
    terminal = None if user is None else open_terminal(user.uid)
    try:
        yield terminal
    finally:
        if terminal is not None:
            terminal.close()


def start(
    command: Sequence[str],
    cgroup: MemoryCgroup,
    user: User | None,
    signals: Signals,
    terminal: JobTerminal | None = None,
    preload: Preload | None = None,
) -> subprocess.Popen[bytes]:
    """Starts the command in the cgroup. With a terminal of its own the process is that one's
    leader, which ends as the job ends.

    Raises:
        CommandNotFoundError: no such command.
        CommandNotExecutableError: it cannot be executed.
        SystemCallError: no process could be made, or it could not enter the cgroup.
    """
    streams = (None, None, None) if terminal is None else terminal.standard_streams()
    environment = None if user is None else dict(user.environment)
    if preload is not None:
        environment = preload.environment(os.environ if user is None else user.environment)
    reason_read, reason_write = os.pipe()
    try:
        process = subprocess.Popen(
            list(command),
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            preexec_fn=_entry(cgroup, user, signals, terminal, reason_write),
            env=environment,
            pass_fds=() if preload is None else preload.descriptors,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise _start_error(error, command[0], environment, reason_read) from error
    finally:
        os.close(reason_read)
        os.close(reason_write)
    if terminal is not None:
        terminal.started()
    return process


def _entry(
    cgroup: MemoryCgroup,
    user: User | None,
    signals: Signals,
    terminal: JobTerminal | None,
    reason_write: int,
) -> Callable[[], None]:
    """What the child does between fork and exec; the runner has no other thread. What goes wrong
    is written to `reason_write`."""
    libc = ctypes.CDLL(None)
    runner = os.getpid()

    def die_with(parent: int) -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    def enter() -> None:
        try:
            parent = runner if terminal is None else terminal.enter()
            # Whoever cleans up after a killed runner looks for its job in the cgroup, so until
            # we are in there the kernel has to end us.
            die_with(parent)
            cgroup.add(os.getpid())
            signal.pthread_sigmask(signal.SIG_SETMASK, signals.mask)
            if user is not None:
                os.setgroups(user.groups)
                os.setresgid(user.gid, user.gid, user.gid)
                os.setresuid(user.uid, user.uid, user.uid)
                die_with(parent)  # the kernel has forgotten it with the change of user
        except Exception as error:
            os.write(reason_write, str(error).encode(errors="replace")[:_REASON_BYTES_MAX])
            raise

    return enter


def _start_error(
    error: Exception, name: str, environment: Mapping[str, str] | None, reason_read: int
) -> InfiniswapError:
    """Why no process could be made for the command of that name, in our words."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        path = (os.environ if environment is None else environment).get("PATH", os.defpath)
        if os.path.exists(shutil.which(name, path=path) or name):
            return CommandNotExecutableError(
                f"{name!r} cannot be executed: the interpreter it names does not exist",
                mend="See its first line.",
            )
        return _not_found(name)
    if isinstance(error, OSError):
        return _not_executable(name, error.strerror)
    os.set_blocking(reason_read, False)
    reason = ""
    with contextlib.suppress(BlockingIOError):
        reason = os.read(reason_read, _REASON_BYTES_MAX).decode(errors="replace")
    return SystemCallError(f"the job cannot be set up: {reason or error}")


def wait(
    process: subprocess.Popen[bytes],
    cgroup: MemoryCgroup,
    signals: Signals,
    tick: Callable[[], None],
    terminal: JobTerminal | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> JobResult:
    """Waits for the job, handing signals on.

    Args:
        process: the job.
        cgroup: it runs in.
        signals: from block_signals, around the start too.
        tick: called often at the beginning, then about ten times a second; what it raises ends
            the wait.
        terminal: of the job's own.
        on_stop: called before this process stops, without a terminal of the job's own.
    """
    started_s = next_s = time.monotonic()
    sample_s = _SAMPLE_S_MIN
    while True:
        if (now_s := time.monotonic()) >= next_s:
            tick()
            next_s = now_s + sample_s
            sample_s = min(2 * sample_s, _SAMPLE_S_MAX)
        wanted = {signals.fd: select.POLLIN, **(terminal.wanted() if terminal else {})}
        ready = poll(wanted, max(0.0, next_s - time.monotonic()))
        info = take_pending(signals.taken)
        if info is not None and info.si_signo != signal.SIGCHLD:
            _hand_on(info, process.pid, cgroup, terminal, on_stop)
        if terminal is not None:
            terminal.serve(ready)
        code = process.poll()
        if code is not None:
            return JobResult(
                exit_code=code if code >= 0 else 128 - code,
                elapsed_s=time.monotonic() - started_s,
            )
