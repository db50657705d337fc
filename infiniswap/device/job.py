# SPDX-License-Identifier: Apache-2.0
"""The job of `infiniswap run`: a process in a memory cgroup, as the invoking user.

The runner stays root to undo everything; only the job's own process drops to the user that called
sudo, with that user's groups, environment and PATH, before it executes the command.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import NotFoundError, SystemCallError, UsageError
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC

_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGQUIT,
)
_WAITED: Final = (*_FORWARDED, signal.SIGCHLD)
_SI_KERNEL: Final = 0x80
_SAMPLE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class User:
    """Whom the job runs as. `environment` is complete."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    environment: Mapping[str, str]


def invoking_user(environ: Mapping[str, str], *, proc: Path = PROC) -> User | None:
    """The user who called sudo; None when it was not sudo.

    Raises:
        UsageError: SUDO_UID names nobody.
    """
    text = environ.get("SUDO_UID", "")
    if not text or text == "0":
        return None
    try:
        entry = pwd.getpwuid(int(text))
    except (ValueError, KeyError):
        raise UsageError(
            f"SUDO_UID={text} names no user of this host",
            mend="Unset SUDO_UID to run the command as root.",
        ) from None
    environment = _sudo_environment(proc) or {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        **{key: environ[key] for key in ("LANG", "TERM", "DISPLAY") if key in environ},
    }
    environment.update(HOME=entry.pw_dir, USER=entry.pw_name, LOGNAME=entry.pw_name)
    environment.setdefault("SHELL", entry.pw_shell or "/bin/sh")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, environment)


def _sudo_environment(proc: Path) -> dict[str, str] | None:
    """What the user's shell gave to sudo: sudo itself hands on a reduced one, with another PATH."""
    pid, found = os.getppid(), None
    for _ in range(16):
        try:
            comm = (proc / str(pid) / "comm").read_text().strip()
            status = (proc / str(pid) / "stat").read_text()
        except OSError:
            break
        if comm != "sudo":
            break
        found = pid  # the outermost one: sudo may have put a monitor in between
        pid = int(status.rpartition(")")[2].split()[1])
    if found is None:
        return None
    try:
        raw = (proc / str(found) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (item.decode(errors="surrogateescape").partition("=") for item in raw.split(b"\0"))
    return {key: value for key, _, value in pairs if key}


@dataclass(slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_code: the command's, or 128 + N for signal N.
        elapsed_s: wall time.
        anon_peak_bytes: highest anonymous memory seen, in RAM and swapped out together.
        usage_peak_bytes: highest use of RAM, None where the kernel does not tell.
        oom_kills: processes of the job that the kernel killed for its memory limit.
    """

    exit_code: int
    elapsed_s: float
    anon_peak_bytes: int
    usage_peak_bytes: int | None
    oom_kills: int


def start(
    command: Sequence[str], cgroup: MemoryCgroup, user: User | None
) -> subprocess.Popen[bytes]:
    """Starts the command in the cgroup. Call after `block_signals`.

    Raises:
        NotFoundError: no such command.
        SystemCallError: it cannot be executed.
    """

    def enter() -> None:
        # In the child, between fork and exec; the runner has no other thread.
        cgroup.add(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if user is not None:
            os.setgroups(user.groups)
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)

    environment = None if user is None else dict(user.environment)
    try:
        return subprocess.Popen(list(command), preexec_fn=enter, env=environment)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            f"there is no command {command[0]!r}", mend="Check the spelling and the PATH."
        ) from error
    except PermissionError as error:
        raise SystemCallError(
            f"{command[0]!r} cannot be executed: {error.strerror}", mend="Check its permissions."
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemCallError(f"cannot start {command[0]!r}: {error}") from error


@contextlib.contextmanager
def block_signals():  # type: ignore[no-untyped-def]
    """Signals are taken by `wait` while this is open, and by nobody before the job runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait(
    process: subprocess.Popen[bytes],
    cgroup: MemoryCgroup,
    started_s: float,
    tick: Callable[[], None],
) -> JobResult:
    """Waits for the job, handing signals on.

    Ctrl-C reaches the job from the terminal itself; the same signal sent to the runner by a
    program does not, so that one is forwarded.

    Args:
        tick: called about ten times a second.
    """
    anon_peak_bytes = 0
    while True:
        info = signal.sigtimedwait(_WAITED, _SAMPLE_S)
        sent = info is not None and info.si_signo != signal.SIGCHLD
        if info is not None and sent and info.si_code != _SI_KERNEL:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(info.si_signo)
        memory = cgroup.memory()
        anon_peak_bytes = max(anon_peak_bytes, memory.anon_bytes + (memory.swap_bytes or 0))
        code = process.poll()
        if code is not None:
            return JobResult(
                exit_code=code if code >= 0 else 128 - code,
                elapsed_s=time.monotonic() - started_s,
                anon_peak_bytes=anon_peak_bytes,
                usage_peak_bytes=memory.peak_bytes,
                oom_kills=memory.oom_kills or 0,
            )
        tick()
