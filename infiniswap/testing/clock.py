# SPDX-License-Identifier: Apache-2.0
"""A clock that goes on only when told to."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Now, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Lets time pass.

        Raises:
            ValueError: backwards.
        """
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now_s += seconds
