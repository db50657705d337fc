# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap run` says: lines of its own, and one that is rewritten while the job runs.

That one has the lowest row of the terminal to itself: what the job writes scrolls above it, in the
terminal's scroll region.
"""

from __future__ import annotations

import contextlib
import os
import termios
import time
from collections.abc import Sequence
from typing import Final

from infiniswap.control.text import printable
from infiniswap.device.control import client
from infiniswap.device.jobs import account, usage
from infiniswap.device.jobs.terminal import JobTerminal, is_line_mode
from infiniswap.device.spec import rundir
from infiniswap.errors import InfiniswapError

_ASK_S_MIN: Final = 0.1
_LIVE_S: Final = 1.0
_COLUMNS: Final = 80  # of a terminal that does not say
_LINES_MIN: Final = 4
_PREFIX: Final = "infiniswap: "

# DEC's sequences (VT100), which all terminals know: index, cursor up, save, scroll region, restore.
_RESERVE: Final = "\x1bD\x1b[A\x1b7\x1b[1;{last}r\x1b8"
_TO_LINE: Final = "\x1b7\x1b[{line};1H\x1b[0m\x1b[K"
_BACK: Final = "\x1b8"


def say(text: str) -> None:
    """Prints a line to standard error, without what is no text in it: a command's name may hold
    anything.

    Raises nothing: a closed terminal or pipe must not change the exit code.
    """
    put(f"infiniswap: {printable(text)}{_line_end()}")


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
    """Asks the device, soon at first and then about once a second; prints news for the user, and
    rewrites one line on a terminal once the job has run for a second. Not while the job reads
    single keys: it then has the whole terminal.

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
        self._is_terminal = os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb"
        self._job_terminal: JobTerminal | None = None
        self._ask_s = _ASK_S_MIN  # a short job shall not end unseen
        self._next_s = time.monotonic() + self._ask_s
        self._shown_from_s = time.monotonic() + _LIVE_S
        self._facts: tuple[str, ...] = ()
        self._size: os.terminal_size | None = None
        """Size of the terminal while the line is shown; None before and after."""

    def follow(self, terminal: JobTerminal | None) -> None:
        """Takes the terminal that the job has of its own; None: it has this process's."""
        self._job_terminal = terminal
        if terminal is not None:
            terminal.on_stop = self.clear

    def tick(self) -> None:
        """Called often."""
        if time.monotonic() >= self._next_s:
            self._ask_s = min(2 * self._ask_s, _LIVE_S)
            self._next_s = time.monotonic() + self._ask_s
            self._ask()
        elif self._size is not None and self._size != _terminal_size():
            self._show()

    def _ask(self) -> None:
        try:
            status = client.status(self._paths, wait_s=_LIVE_S / 2)
        except InfiniswapError:
            return
        news, memory = self._told.add(status), self._sampler.memory
        if not self._enabled:
            return
        if news and self._size is not None:
            put(_fresh_line(self._size))
        for line in news:
            say(line)
        if memory is not None:
            self._facts = usage.describe_progress(memory, self._local_bytes, self._told)
            self._show()

    def _show(self) -> None:
        if not self._is_terminal or not _is_foreground():
            return
        if time.monotonic() < self._shown_from_s:
            return
        size = _terminal_size()
        if size.lines < _LINES_MIN or not is_line_mode(self._job_terminal):
            self.clear()
            return
        begin = "" if size == self._size else _RESERVE.format(last=size.lines - 1)
        self._size = size
        line = fit(self._facts, size.columns - 1)
        put(f"{begin}{_TO_LINE.format(line=size.lines)}{line}{_BACK}")

    def clear(self) -> None:
        """Takes the line away, and gives its row back. What is printed next begins a line."""
        size, self._size = self._size, None
        if size is not None and _is_foreground():
            put(f"{_TO_LINE.format(line=size.lines)}\x1b[r{_BACK}{_fresh_line(size)}")


def fit(facts: Sequence[str], columns: int) -> str:
    """As many of these as fit into a line, the first ones first; at least one, cut if necessary."""
    line = _PREFIX + facts[0] if len(_PREFIX + facts[0]) <= columns else facts[0][: max(0, columns)]
    for fact in facts[1:]:
        if len(line) + len(", " + fact) > columns:
            break
        line += ", " + fact
    return line


def _terminal_size() -> os.terminal_size:
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(2)
        return os.terminal_size((size.columns or _COLUMNS, size.lines))
    return os.terminal_size((_COLUMNS, 0))


def _fresh_line(size: os.terminal_size) -> str:
    """Goes to the next line, unless the cursor is at the beginning of one: only then so many blanks
    fit into it."""
    return " " * size.columns + "\r\x1b[K"


def _is_foreground() -> bool:
    """Whether this process may write to the terminal; a background process must not."""
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:
        return True  # not our controlling terminal
