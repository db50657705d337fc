# SPDX-License-Identifier: Apache-2.0
"""Progress lines of the demo."""

from __future__ import annotations

import contextlib
import time


class Progress:
    """Says what happens, with the time since the start."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def say(self, text: str) -> None:
        """One line. Raises BrokenPipeError when the reader has gone, which ends the demo."""
        print(f"[{self.elapsed_s:5.1f} s] {text}", flush=True)

    def try_say(self, text: str) -> None:
        """One line, for times at which nothing may be raised."""
        with contextlib.suppress(OSError):
            self.say(text)
