# SPDX-License-Identifier: Apache-2.0
"""How busy a lease is, as far as its donor sees it: pages that travel by TCP. No I/O, no clock."""

from __future__ import annotations

from typing import Final

from infiniswap.policy.ewma import Ewma
from infiniswap.units import PAGE_BYTES

_ALPHA: Final = 0.2
"""As the paper averages the activity of a slab (infiniswap.policy.activity)."""


class Traffic:
    """Average of the pages that a lease's device reads and writes."""

    __slots__ = ("_bytes", "_rate", "_taken_s")

    def __init__(self) -> None:
        self._rate = Ewma(_ALPHA)
        self._bytes = 0
        self._taken_s: float | None = None

    @property
    def pages_per_s(self) -> float | None:
        """The average; None before there were two counts."""
        return self._rate.value

    def take(self, total_bytes: int, now_s: float) -> None:
        """Takes a count.

        Args:
            total_bytes: read and written so far; less than before: the count has begun again.
            now_s: seconds of a clock that nobody sets. A count that is no later than the last one
                is ignored.
        """
        before_s, before_bytes = self._taken_s, self._bytes
        if before_s is not None and now_s <= before_s:
            return
        self._taken_s, self._bytes = now_s, total_bytes
        if before_s is not None:
            moved = total_bytes - before_bytes if total_bytes >= before_bytes else total_bytes
            self._rate.update(now_s, moved / PAGE_BYTES / (now_s - before_s))
