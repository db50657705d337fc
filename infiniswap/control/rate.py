# SPDX-License-Identifier: Apache-2.0
"""How often a peer may send something. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """What a peer may send.

    Attributes:
        burst: at once, after a silence.
        per_s: in the long run.
    """

    burst: int
    per_s: float


class RateLimit:
    """Counts what one peer says (a token bucket).

    Args:
        rate: what it may send.
    """

    __slots__ = ("_left", "_then_s", "rate")

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._left = float(rate.burst)
        self._then_s: float | None = None

    def take(self, now_s: float, count: int = 1) -> bool:
        """Counts that many more; False: too many."""
        if self._then_s is not None:
            gained = max(0.0, now_s - self._then_s) * self.rate.per_s
            self._left = min(self._left + gained, float(self.rate.burst))
        self._then_s = now_s
        if self._left < count:
            return False
        self._left -= count
        return True
