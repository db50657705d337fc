# SPDX-License-Identifier: Apache-2.0
"""Turns on a machine where others measure, too: who measures holds the lock of an agreed file."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

_TURN_S = 170.0
"""Then the others get theirs, once the cell at hand is done."""
_PAUSE_S = 0.5
"""In which another one, who waits, gets the lock."""


class Turns:
    """Context manager: the lock is held between `begin` calls.

    Args:
        path: of the file; None: nobody else measures.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = -1
        self._since_s = 0.0

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def begin(self, expected_s: float) -> None:
        """Before a measurement that should take that long: takes the lock, or takes it anew when
        the turn would become too long.

        Raises:
            OSError: the file cannot be opened.
        """
        if self._path is None:
            return
        if self._file >= 0:
            if time.monotonic() - self._since_s + expected_s <= _TURN_S:
                return
            self._end()
            time.sleep(_PAUSE_S)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._since_s = time.monotonic()

    def _end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
