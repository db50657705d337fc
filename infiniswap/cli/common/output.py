# SPDX-License-Identifier: Apache-2.0
"""Standard streams that are closed, full, or without a reader, and the console of results."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

_STDOUT: Final = 1
_STDERR: Final = 2
_PIPE_COLUMNS: Final = 200


class OutputError(OSError):
    """Standard output takes nothing more."""


class _Stream(io.FileIO):
    """One of the two, for writing.

    Args:
        fd: its number; stays open.
        is_result: a failure is raised, the first time: what was to be printed is missing. The
            other stream has messages only, whose loss changes nothing.
    """

    def __init__(self, fd: int, *, is_result: bool) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._is_result = is_result
        self._failed = False

    def write(self, data: Any) -> int:
        """Writes some of it, or drops all of it after a failure."""
        if self._failed:
            return len(data)
        try:
            # None: it is a terminal, or a pipe, that another program has made non-blocking.
            while (written := super().write(data)) is None:
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            if not self._is_result:
                return len(data)
            # Else Python tries the rest again when it ends, and says so in its own words.
            self._failed = True
            raise OutputError(error.errno, error.strerror) from error


def open_standard_streams() -> None:
    """Makes all three usable, whatever this process was started with (`>&-`, `>/dev/full`)."""
    # Where one is closed, the next file that is opened would take its number.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    # Any other stream belongs to a test or a program that captures what is printed.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_STDOUT, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_STDERR, sys.stderr)


def _text(fd: int, before: Any) -> io.TextIOWrapper:
    """A text stream; what its encoding lacks is written as an escape."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(fd, is_result=fd == _STDOUT)),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",
        # The second is what PYTHONUNBUFFERED asks for.
        line_buffering=not before or before.line_buffering or before.write_through,
    )


def is_reader_gone(error: OutputError) -> bool:
    """Whether the reader has closed the pipe (`| head`), which is no failure."""
    return error.errno == errno.EPIPE


def results_console() -> Console:
    """On standard output. Into a file or a pipe it writes long lines, so that `grep` finds whole
    sentences."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=_PIPE_COLUMNS)


def plain_console(*, width: int | None = None, stderr: bool = False) -> Console:
    """A console that prints text as it is. To rich itself `[fd00::2]` is markup and `:cat:` a
    picture, wherever the text stands: in a cell, a heading, a title or a sentence."""
    from rich.console import Console

    return Console(width=width, stderr=stderr, markup=False, emoji=False)
