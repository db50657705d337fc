# SPDX-License-Identifier: Apache-2.0
"""Starting programs: ours and the system's. Nothing else in the package starts one.

Most of our processes are root's, and are started from wherever somebody happens to be. So a program
gets nothing that another user may have prepared or a shell may have left: an absolute path, `/` as
its working directory, and an environment made here; Python is isolated (`-I`), which leaves out
modules in the working directory, PYTHON* variables and the user's own site directory. The job of
`infiniswap run` is the user's program and keeps its environment (infiniswap.device.jobs.job).

tools/check_layers.py refuses any other place that starts a program.

No function forks with Python code in the child: `subprocess` uses vfork when there is no
`preexec_fn`, so a large locked process neither copies its page tables nor needs the memory twice.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from infiniswap.errors import (
    DeadlineError,
    SystemCallError,
    UnavailableError,
    from_oserror,
)
from infiniswap.own_code import CODE_OWNER
from infiniswap.system import bounded
from infiniswap.system.signals import for_a_program

Process = subprocess.Popen[bytes]
"""A child of this process."""
TimeoutExpired = subprocess.TimeoutExpired
"""What `Process.wait` raises."""
DEVNULL: Final = subprocess.DEVNULL
PIPE: Final = subprocess.PIPE
STDOUT: Final = subprocess.STDOUT

SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs of the system are looked for, by us and by them; the caller's PATH never is."""

COMMAND_S_MAX = 30.0
"""How long a command of the system may take unless the caller says otherwise, seconds."""

CHILD_KILL_S_MAX = 5.0

_LOOK_S = 0.02
"""How often a short command is looked at."""

_SETTINGS = "INFINISWAP_"
_CONFIG_FILE = "INFINISWAP_CONFIG"
_PASSED: Final = ("JOURNAL_STREAM", CODE_OWNER)
"""Whether standard error is the journal, and whose checkout root may run; neither names a file."""

_AFTER_A_LINE: Final = 'read -r line && unset line PWD OLDPWD SHLVL && exec "$@" </dev/null'

_PACKAGES = {
    "blockdev": "util-linux",
    "groupadd": "passwd",
    "useradd": "passwd",
    "userdel": "passwd",
    "ip": "iproute2",
    "tc": "iproute2",
    "losetup": "mount",
    "mkswap": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "swapon": "mount",
    "swapoff": "mount",
}


# --------------------------------------------------------------------- what they get


def environment(
    changes: Mapping[str, str] | None = None,
    *,
    settings: bool = True,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of a program: SEARCH_PATH, messages in English, our settings, and
    `changes`.

    Args:
        changes: added at the end.
        settings: pass on the caller's INFINISWAP_* variables.
        base: the caller's environment; None: this process's.
    """
    caller = os.environ if base is None else base
    env = {"PATH": SEARCH_PATH, "LC_ALL": "C"}
    env |= {name: caller[name] for name in _PASSED if name in caller}
    if CODE_OWNER not in env and "SUDO_UID" in caller:
        env[CODE_OWNER] = caller["SUDO_UID"]  # whose checkout this is, perhaps
    if settings:
        env |= {name: text for name, text in caller.items() if name.startswith(_SETTINGS)}
        if env.get(_CONFIG_FILE):  # meant from the caller's directory
            env[_CONFIG_FILE] = os.path.abspath(env[_CONFIG_FILE])
    return env | dict(changes or {})


def find(name: str) -> str | None:
    """The absolute path of a program of the system, None where it is not installed."""
    return None if "/" in name else shutil.which(name, path=SEARCH_PATH)


def python(*args: str) -> list[str]:
    """The command for this very interpreter, isolated: `-m MODULE ARGS...` or `FILE ARGS...`."""
    return [sys.executable, "-I", *args]


def infiniswap(*args: str) -> list[str]:
    """The command `infiniswap ARGS...` as this very installation has it."""
    return python("-m", "infiniswap", *args)


def missing(name: str) -> UnavailableError:
    """The error for a program of the system that is not installed."""
    package = _PACKAGES.get(name)
    return UnavailableError(
        f"the command `{name}` is not installed",
        mend=f"Install it: apt install {package}." if package else "Install it.",
    )


def _located(argv: Sequence[str]) -> list[str]:
    name = argv[0]
    path = name if os.path.isabs(name) else find(name)
    if path is None:
        raise missing(name)
    return [path, *argv[1:]]


# ---------------------------------------------------------------------- starting them


def start(
    argv: Sequence[str],
    *,
    stdin: int = DEVNULL,
    stdout: int | IO[bytes] = DEVNULL,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    keep: Sequence[str] | None = None,
    before: Callable[[int], None] | None = None,
    what: str = "",
    mend: str = "",
) -> Process:
    """Starts a program in a session of its own, which the terminal's signals do not reach.

    Args:
        argv: its name in SEARCH_PATH or its absolute path, and arguments. File names among them
            must be absolute.
        stdin, stdout, stderr: as for subprocess.Popen; standard error stays the caller's.
        pass_fds: further descriptors it gets, under the same numbers.
        env: from `environment`; None: that without changes.
        keep: capabilities that the program may have, see `bounded.give_up`; None: as we have.
        before: called with its pid before it is executed; its standard input is /dev/null then.
        what: could not be done when it cannot be started.
        mend: remedy to name when it cannot be started.

    Raises:
        UnavailableError: no such program; names the Debian package.
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    located = _located(argv)
    if before is not None:
        located = ["/bin/sh", "-c", _AFTER_A_LINE, "sh", *located]

    def popen() -> Process:
        return subprocess.Popen(
            located,
            stdin=stdin if before is None else PIPE,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
            cwd="/",
            env=environment() if env is None else dict(env),
        )

    try:
        with for_a_program():
            process = popen() if keep is None else bounded.within(keep, popen)
    except OSError as error:
        raise from_oserror(what or f"cannot run `{argv[0]}`", error, mend=mend) from error
    if before is not None:
        _let_go(process, before)
    return process


def _let_go(process: Process, before: Callable[[int], None]) -> None:
    """Has a child that waits for a line execute its program, after `before`."""
    assert process.stdin is not None
    try:
        before(process.pid)
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # somebody killed it
            pipe.write(b"\n")
    except BaseException:
        process.kill()
        process.wait()
        process.stdin.close()
        raise
    finally:
        process.stdin = None


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended.

    Attributes:
        code: as subprocess has it.
    """

    code: int
    stdout: str
    stderr: str


def finish(argv: Sequence[str], *, timeout_s: float = COMMAND_S_MAX, mend: str = "") -> Done:
    """Runs a command to its end, whatever its exit code.

    Args:
        argv: the command, see `start`.
        timeout_s: seconds after which it is killed.
        mend: remedy to name when it fails.

    Raises:
        UnavailableError: no such command; names the Debian package.
        NotPermittedError, SystemCallError: it could not be started.
        DeadlineError: it took too long.
    """
    child = start(argv, stdout=PIPE, stderr=PIPE, mend=mend)
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except TimeoutExpired as error:
        raise _late(child, argv, timeout_s, mend) from error
    return Done(child.returncode, _text(stdout), _text(stderr))


class ShortCommand:
    """A command of an administrator's that prints a few bytes, run again and again: without
    capabilities, with an end, and with nothing left of it. One thread at a time may run it.

    Args:
        argv: absolute path and arguments.
        timeout_s: seconds after which it is killed.
        output_bytes_max: of each of its outputs; with more it is killed.
    """

    def __init__(self, argv: Sequence[str], timeout_s: float, output_bytes_max: int = 4096) -> None:
        self._argv = list(argv)
        self._timeout_s = timeout_s
        self._output_bytes_max = output_bytes_max
        self._stopped = threading.Event()
        self._last: Process | None = None

    def stop(self) -> None:
        """Ends a run that is under way, soon; there is no further one. From any thread."""
        self._stopped.set()

    def run(self) -> Done:
        """Runs it to its end, whatever its exit code, and kills every process of its group. Blocks.

        Raises:
            UnavailableError, NotPermittedError, SystemCallError: it could not be started.
            DeadlineError: it took too long, or printed too much.
        """
        text = self._argv[0]
        if self._last is not None and self._last.poll() is None:
            raise DeadlineError(f"`{text}` cannot be killed (process {self._last.pid})")
        child = start(
            self._argv, stdout=PIPE, stderr=PIPE, keep=(), env=environment(settings=False)
        )
        self._last = child
        assert child.stdout is not None
        assert child.stderr is not None
        outputs: dict[IO[bytes], bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
        try:
            is_done = self._follow(child, outputs)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # before it is reaped its number is its own
            with contextlib.suppress(TimeoutExpired):
                child.wait(CHILD_KILL_S_MAX)
            for pipe in outputs:
                pipe.close()
        if max(map(len, outputs.values())) > self._output_bytes_max:
            raise DeadlineError(f"`{text}` printed more than {self._output_bytes_max} bytes")
        if not is_done:
            raise DeadlineError(f"`{text}` did not end within {self._timeout_s:g} s")
        stdout, stderr = outputs.values()
        return Done(child.returncode, _text(stdout), _text(stderr))

    def _follow(self, child: Process, outputs: dict[IO[bytes], bytearray]) -> bool:
        """Reads until the command has ended, which may leave others with its outputs; False: it has
        not."""
        end_s = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for pipe in outputs:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, outputs[pipe])
            while True:
                flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
                has_ended = os.waitid(os.P_PID, child.pid, flags) is not None
                for key, _ in selector.select(0.0 if has_ended else _LOOK_S):
                    read = os.read(key.fd, self._output_bytes_max + 1)
                    key.data.extend(read)
                    if not read:
                        selector.unregister(key.fileobj)
                if max(map(len, outputs.values())) > self._output_bytes_max:
                    return False
                if has_ended or self._stopped.is_set() or time.monotonic() >= end_s:
                    return has_ended


def convert(
    argv: Sequence[str], given: bytes | bytearray, into: bytearray, *, timeout_s: float
) -> tuple[int, Done]:
    """Runs a command to its end whose input and output are a key, of which no copy is left here.

    Args:
        argv: the command, see `start`.
        given: its standard input, less than a pipe holds (64 KiB).
        into: for its standard output.
        timeout_s: seconds after which it is killed.

    Returns:
        How many bytes of output there are, and how the command ended, without its output.

    Raises:
        As `finish`.
    """
    child = start(argv, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout as output, child.stderr as complaints:
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            os.write(pipe.fileno(), given)
        child.stdin = None
        try:
            child.wait(timeout_s)
        except TimeoutExpired as error:
            raise _late(child, argv, timeout_s, "") from error
        for file in (output, complaints):
            os.set_blocking(file.fileno(), False)  # something that it has left may hold the end
        try:
            got = os.readv(output.fileno(), [into])
        except BlockingIOError:
            got = 0
        return got, Done(child.returncode, "", _text(complaints.read() or b""))


def _late(child: Process, argv: Sequence[str], timeout_s: float, mend: str) -> DeadlineError:
    ended = _kill_child(child)
    more = "" if ended else f" and cannot be killed (process {child.pid} waits in the kernel)"
    text = " ".join(argv)
    return DeadlineError(f"`{text}` did not end within {timeout_s:g} s{more}", mend=mend)


def _text(output: bytes | bytearray) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n")


def run_command(argv: Sequence[str], *, timeout_s: float = COMMAND_S_MAX, mend: str = "") -> str:
    """Runs a command that must succeed and returns its standard output.

    Raises:
        SystemCallError: it ended with an error; the text holds its standard error.
        Others: see `finish`.
    """
    done = finish(argv, timeout_s=timeout_s, mend=mend)
    if done.code != 0:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.code}"
        raise SystemCallError(f"`{' '.join(argv)}` failed: {reason}", mend=mend)
    return done.stdout


def _kill_child(child: Process) -> bool:
    """Kills and reaps. False when it did not end: it waits for something in the kernel, and
    waiting for it here would only make two that hang."""
    child.kill()
    try:
        child.communicate(timeout=CHILD_KILL_S_MAX)
    except TimeoutExpired:
        return False
    return True
