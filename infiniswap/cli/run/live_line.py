# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap run` says: lines of its own, and one that is rewritten while the job runs."""

from __future__ import annotations

import contextlib
import os
import termios
import time
from collections.abc import Sequence
from typing import Final

from infiniswap.device.control import client
from infiniswap.device.jobs import account, usage
from infiniswap.device.spec import rundir
from infiniswap.errors import InfiniswapError

_LIVE_S: Final = 1.0
_COLUMNS: Final = 80  # of a terminal that does not say
_PREFIX: Final = "infiniswap: "


def say(text: str) -> None:
    """Prints a line to standard error.

    Raises nothing: a closed terminal or pipe must not change the exit code.
    """
    put(f"infiniswap: {text}{_line_end()}")


def _line_end() -> str:
    """Needed because a terminal that the job has made raw leaves the cursor in its column."""
    with contextlib.suppress(termios.error, OSError):
        return "\n" if termios.tcgetattr(2)[1] & termios.OPOST else "\r\n"
    return "\n"


def put(text: str) -> None:
    """Prints text without a line end; raises nothing, as `say`."""
    # Not by way of sys.stderr, which keeps what it could not write, and fails with it at exit.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


class LiveLine:
    """Asks the device about once a second; prints news for the user, and rewrites one line on a
    terminal.

    Args:
        paths: of the device.
        sampler: of the job.
        local_bytes: the job's limit.
        told: gets every status of the device.
        enabled: whether anything is printed.
    """

    def __init__(
        self,
        paths: rundir.DevicePaths,
        sampler: usage.Sampler,
        local_bytes: int,
        told: account.Account,
        *,
        enabled: bool,
    ) -> None:
        self._paths = paths
        self._sampler = sampler
        self._local_bytes = local_bytes
        self._told = told
        self._enabled = enabled
        self._is_terminal = os.isatty(2)
        self._next_s = time.monotonic() + _LIVE_S
        self._facts: tuple[str, ...] = ()
        self._columns = 0

    def tick(self) -> None:
        """Called often; asks at most once a second."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LIVE_S
            self._ask()
        elif self._columns and self._columns != _columns():
            self._show()

    def _ask(self) -> None:
        try:
            status = client.status(self._paths, wait_s=_LIVE_S / 2)
        except InfiniswapError:
            return
        news, memory = self._told.add(status), self._sampler.memory
        if not self._enabled:
            return
        if news:
            self.clear()
        for line in news:
            say(line)
        if memory is not None:
            self._facts = usage.describe_progress(memory, self._local_bytes, status)
            self._show()

    def _show(self) -> None:
        if self._is_terminal and _is_foreground():
            self._columns = _columns()
            # The job's own output follows right behind it.
            put(f"\r\x1b[K{fit(self._facts, self._columns - 3)}  ")

    def clear(self) -> None:
        """Takes the line away."""
        if self._columns and _is_foreground():
            put("\r\x1b[K")
        self._columns = 0


def fit(facts: Sequence[str], columns: int) -> str:
    """As many of these as fit into a line, the first ones first; at least one, cut if necessary."""
    line = _PREFIX + facts[0] if len(_PREFIX + facts[0]) <= columns else facts[0][: max(0, columns)]
    for fact in facts[1:]:
        if len(line) + len(", " + fact) > columns:
            break
        line += ", " + fact
    return line


def _columns() -> int:
    with contextlib.suppress(OSError):
        return os.get_terminal_size(2).columns or _COLUMNS
    return _COLUMNS


def _is_foreground() -> bool:
    """Whether this process may write to the terminal; a background process must not."""
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:
        return True  # not our controlling terminal
