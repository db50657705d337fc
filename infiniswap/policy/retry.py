# SPDX-License-Identifier: Apache-2.0
"""Pauses between attempts that fail, and between complaints that repeat themselves."""

from __future__ import annotations

from random import Random


class Backoff:
    """Pauses between attempts. Each is twice as long as the last, up to a bound, and drawn from its
    upper half, so that hosts which lost the same peer do not come back at the same moment.

    Args:
        first_s: the first pause, at most.
        max_s: the longest.
        rng: source of randomness.
    """

    def __init__(self, first_s: float, max_s: float, rng: Random) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._rng = rng
        self._failures = 0

    def pause_s(self) -> float:
        """The pause after one more failure."""
        # The exponent is bounded so that it cannot overflow.
        longest_s = min(self._first_s * 2.0 ** min(self._failures, 32), self._max_s)
        self._failures += 1
        return longest_s * self._rng.uniform(0.5, 1.0)

    def good(self) -> None:
        """An attempt has succeeded."""
        self._failures = 0


class Complaints:
    """Says when something is worth a line: at once, then at most once in `every_s` for each kind.

    Args:
        every_s: least distance of two lines of one kind.
        kinds_max: remembered at once; with more of them the oldest is forgotten.
    """

    def __init__(self, every_s: float, kinds_max: int = 64) -> None:
        self._every_s = every_s
        self._kinds_max = kinds_max
        self._told: dict[str, tuple[float, int]] = {}  # when, and how many since

    def due(self, kind: str, now_s: float) -> int | None:
        """One more of that kind: how many were not logged since the last line; None: do not log
        this one either."""
        told_s, left_out = self._told.get(kind, (float("-inf"), 0))
        if now_s - told_s < self._every_s:
            self._told[kind] = (told_s, left_out + 1)
            return None
        self._told.pop(kind, None)
        while len(self._told) >= self._kinds_max:
            del self._told[next(iter(self._told))]
        self._told[kind] = (now_s, 0)
        return left_out
