# SPDX-License-Identifier: Apache-2.0
"""Processes that the demo starts: each dies with it, even when it is killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infiniswap.errors import DeadlineError, SystemCallError, from_oserror
from infiniswap.system import programs
from infiniswap.system.files import log_tail

_KILL_S = 10.0

# A shell of its own, so that a process is in its cgroups before its program starts.
_PLACE = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done; shift; exec "$@"'


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every child: no configuration of this host's own installation, no trace
    of sudo (all jobs run as root), one thread per numeric library. Arrow takes its memory
    from malloc: its own pool gives freed memory back some time later, so that the peak, and with
    it the limit, would depend on how busy the machine is."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    changes = {**dict.fromkeys(names, "1"), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    return programs.environment(changes, settings=False, base=base)


def placed(argv: Sequence[str], cgroups: Sequence[Path]) -> list[str]:
    """The command that first enters these cgroups."""
    files = [str(cgroup / "cgroup.procs") for cgroup in cgroups]
    return ["sh", "-c", _PLACE, "sh", *files, "--", *argv] if files else list(argv)


def mortal(argv: Sequence[str], number: signal.Signals) -> list[str]:
    """The command that gets this signal when the demo dies."""
    return ["setpriv", "--pdeathsig", number.name.removeprefix("SIG"), "--", *argv]


class Child:
    """One process, in a session of its own: Ctrl-C is for the demo, which then ends it.

    Args:
        name: for messages.
        argv: the command.
        log: takes all that it prints.
    """

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        try:
            output = log.open("ab")
        except OSError as error:
            raise from_oserror(f"cannot start {name}", error) from error
        with output:
            self._process = programs.start(
                argv,
                stdout=output,
                stderr=programs.STDOUT,
                env=environment(),
                what=f"cannot start {name}",
            )

    @property
    def exit_code(self) -> int | None:
        """As subprocess has it; None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines that it printed, for an error message."""
        return log_tail(self._log)

    def wait(self, timeout_s: float, tick: Callable[[], None], period_s: float) -> int:
        """Waits for its end, calling `tick` every `period_s` seconds.

        Raises:
            DeadlineError: it did not end in time; it still runs.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._process.wait(period_s)
            except programs.TimeoutExpired:
                pass
            tick()
            if time.monotonic() >= end_s:
                raise DeadlineError(
                    f"{self.name} did not end within {timeout_s:g} s; it last said: "
                    f"{self.log_tail() or 'nothing'}"
                )

    def check(self, code: int) -> None:
        """Refuses an exit code that is not 0.

        Raises:
            SystemCallError: with what the process said last.
        """
        if code == 0:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise SystemCallError(f"{self.name} {how}; it last said: {self.log_tail() or 'nothing'}")

    def end(self, term_s: float) -> None:
        """SIGTERM, and SIGKILL after `term_s` seconds. Idempotent.

        Raises:
            DeadlineError: it survived both: it waits in the kernel.
        """
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(term_s)
            return
        except programs.TimeoutExpired:
            self._process.kill()
        try:
            self._process.wait(_KILL_S)
        except programs.TimeoutExpired:
            raise DeadlineError(
                f"{self.name} (process {self._process.pid}) cannot be killed",
                mend="It waits in the kernel: see dmesg.",
            ) from None
