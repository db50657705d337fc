# SPDX-License-Identifier: Apache-2.0
"""Programs that a benchmark runs. Each carries the run's mark in its environment, is ended with
the run, and dies with this process even if that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infiniswap.errors import DeadlineError, SystemCallError, from_oserror
from infiniswap.own_code import CODE_OWNER
from infiniswap.system.programs import SEARCH_PATH

MARK = "INFINISWAP_TEST_BENCH"
"""Environment variable: the run that a process belongs to. For its prefix the package passes it on
to what it starts, and does not take it for a setting."""

_AUTOGROUP = "/proc/self/autogroup"
_RAISE = f'echo "$1" 2>/dev/null >{_AUTOGROUP}; shift; exec "$@"'
_TERM_S = 20.0
_KILL_S = 10.0
_LOG_LINES = 8
KEPT = "ISW_BENCH_KEPT"
"""A variable: the names of settings that count in a benchmark, with spaces between them."""


def environment(mark: str, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without settings of the host's own installation, plus the mark."""
    kept = {CODE_OWNER, *os.environ.get(KEPT, "").split()}
    env = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("INFINISWAP_") or name in kept
    }
    path = f"{env.get('PATH', os.defpath)}:{SEARCH_PATH}"
    return {**env, "PATH": path, "LC_ALL": "C", MARK: mark, **(changes or {})}


def cpu_s(pid: int) -> float:
    """Processor time of a process with all its threads so far, in seconds; 0 when it is gone.

    The clock is made as clock_getcpuclockid(3) makes it: the ticks in /proc/PID/stat are 10 ms.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Child:
    """A running program that reads commands from a pipe and answers in lines.

    Args:
        name: for messages.
        argv: the command.
        mark: of the run.
        log: takes its standard error, and is quoted when it fails.
        changes: to its environment.
        stop: the signal that ends it.
        ends_on_eof: closing its input ends it in order; the signal is then the second try.
        pass_fds: descriptors it keeps.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        mark: str,
        log: Path,
        *,
        changes: Mapping[str, str] | None = None,
        stop: signal.Signals = signal.SIGTERM,
        ends_on_eof: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._log = log
        self._stop = stop
        self._ends_on_eof = ends_on_eof
        self._buffer = b""
        mortal = mortal_command(argv, stop)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    mortal,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=environment(mark, changes),
                    start_new_session=True,  # Ctrl-C is for us, who then end it in order
                    pass_fds=tuple(pass_fds),
                )
        except OSError as error:
            raise from_oserror(f"cannot start {name}", error) from error

    @property
    def pid(self) -> int:
        """Its process number: setpriv becomes the program."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        """The last lines of what it complained about."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-_LOG_LINES:])

    def failed(self, what: str) -> SystemCallError:
        """An error with what it said last."""
        return SystemCallError(f"{self.name} {what}: {self.log_tail() or 'it said nothing'}")

    def line(self, timeout_s: float) -> str:
        """The next line it prints.

        Raises:
            DeadlineError: none in time.
            SystemCallError: it has ended.
        """
        output = self._process.stdout
        assert output is not None
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise DeadlineError(
                        f"{self.name} did not answer within {timeout_s:g} s; it last said: "
                        f"{self.log_tail() or 'nothing'}"
                    )
                data = os.read(output.fileno(), 65_536)
                if not data:
                    self._process.wait(_KILL_S)
                    raise self.failed(f"ended (exit code {self._process.returncode})")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def answer(self, timeout_s: float) -> Any:
        """The next line, as JSON.

        Raises:
            DeadlineError, SystemCallError: see line; or it is not JSON.
        """
        text = self.line(timeout_s)
        try:
            return json.loads(text)
        except ValueError as error:
            raise SystemCallError(f"{self.name} printed {text!r}, which is no JSON") from error

    def tell(self, text: str) -> None:
        """Writes a line to it.

        Raises:
            SystemCallError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self.failed("does not listen") from error

    def end(self) -> None:
        """Closes its input, then its signal, then SIGKILL. Idempotent.

        Raises:
            DeadlineError: it cannot be killed: it waits in the kernel.
        """
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it had not read all
                    pipe.close()
        if self._ends_on_eof and self._ended_within(_TERM_S):
            return
        self._process.send_signal(self._stop)  # nothing happens when it has ended
        if self._ended_within(_TERM_S):
            return
        self._process.kill()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"{self.name} (process {self.pid}) cannot be killed",
                mend="It waits in the kernel: see dmesg.",
            ) from None

    def _ended_within(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def mortal_command(argv: Sequence[str], number: signal.Signals) -> list[str]:
    """The command that gets this signal when the process that starts it dies, with our priority
    also among sessions: where the kernel groups processes by session, `nice` alone only counts
    within one."""
    mortal = ["setpriv", "--pdeathsig", number.name.removeprefix("SIG"), "--", *argv]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    if priority and os.path.exists(_AUTOGROUP):
        return ["sh", "-c", _RAISE, "sh", str(priority), *mortal]
    return mortal


def output_of(
    argv: Sequence[str],
    mark: str,
    timeout_s: float,
    changes: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> str:
    """Runs a program to its end and returns what it printed.

    Args:
        argv: the command.
        mark: of the run.
        timeout_s: how long it may take.
        changes: to its environment.
        pass_fds: descriptors that it inherits.

    Raises:
        SystemCallError: it failed; says what it complained about.
        DeadlineError: it took longer.
    """
    try:
        done = subprocess.run(
            mortal_command(argv, signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment(mark, changes),
            pass_fds=pass_fds,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"`{argv[0]}` did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise from_oserror(f"cannot run {argv[0]}", error) from error
    if done.returncode:
        said = " | ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-_LOG_LINES:])
        raise SystemCallError(f"`{' '.join(argv)}` failed ({done.returncode}): {said}")
    return done.stdout
