# SPDX-License-Identifier: Apache-2.0
"""Which pages are copied from the backup to a donor next, and how many now.

A slab that has just got a donor holds nothing there: until a page is written again, reading it goes
to the disk. So its pages are copied in the background, the most active slab first, at a rate
(infiniswap.policy.pace) that leaves disk and network to the page-ins for which programs wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_PASSES = 6
"""A page that was written shortly before the slab got its donor is still on its way to the backup
during the first pass, and is found by a later one. The last begins after 16 seconds."""

_PAUSE_S_FIRST = 0.5
"""Pause between the first two passes; it doubles each time."""

_BURST_S = 0.1
"""Copies for so many seconds of the rate may begin at once after a pause."""


@dataclass(slots=True)
class _Filling:
    """How far the copying of a slab is."""

    page: int = 0
    passes: int = 0
    due_s: float = float("-inf")
    """When its next pass begins."""


class Refill:
    """Slabs that are being filled. No I/O, no clock.

    Args:
        pages_per_s: highest rate of all copies together; 0: none.
        now_s: time of the start.
    """

    def __init__(self, pages_per_s: float, now_s: float) -> None:
        if pages_per_s < 0.0:
            raise ValueError(f"a rate of {pages_per_s} pages per second")
        self._pages_per_s_max = pages_per_s
        self._budget = 0.0
        self._looked_s = now_s
        self._slabs: dict[int, _Filling] = {}

    def __bool__(self) -> bool:
        return bool(self._slabs)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Those that are being filled."""
        return tuple(self._slabs)

    def set_rate(self, pages_per_s: float) -> None:
        """Uses another rate from now on; 0 ends all copying.

        Raises:
            ValueError: below zero.
        """
        if pages_per_s < 0.0:
            raise ValueError(f"a rate of {pages_per_s} pages per second")
        self._pages_per_s_max = pages_per_s
        if not pages_per_s:
            self._slabs.clear()

    def begin(self, slab: int) -> None:
        """A slab has got a donor, or its donor back: copying begins at its first page."""
        if self._pages_per_s_max > 0.0:
            self._slabs[slab] = _Filling()

    def end(self, slab: int) -> None:
        """It has lost its donor."""
        self._slabs.pop(slab, None)

    def due_s(self) -> float:
        """When there is something to copy; infinite: not before the next slab begins."""
        return min((filling.due_s for filling in self._slabs.values()), default=float("inf"))

    def step(
        self,
        now_s: float,
        activity: Callable[[int], float],
        copy: Callable[[int, int, int], tuple[int, int] | None],
        slab_pages: int,
        pages_per_s: float | None = None,
    ) -> int:
        """Begins the copies that may begin now; returns the number of pages.

        Args:
            now_s: seconds of the clock used throughout.
            activity: page I/O per second of a slab; the busiest is filled first.
            copy: called with slab, first page and the largest number of pages; returns how many
                copies it began and where to go on, or None if the slab is no longer mapped.
            slab_pages: pages of a slab.
            pages_per_s: rate since the last step; None: the highest.
        """
        rate = min(self._pages_per_s_max, float("inf") if pages_per_s is None else pages_per_s)
        elapsed_s = max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        self._budget = min(max(1.0, rate * _BURST_S), self._budget + elapsed_s * rate)
        done = 0
        due = [slab for slab, filling in self._slabs.items() if filling.due_s <= now_s]
        for slab in sorted(due, key=lambda slab: (-activity(slab), slab)):
            filling = self._slabs[slab]
            while self._budget >= 1.0:
                result = copy(slab, filling.page, int(self._budget))
                if result is None:
                    self.end(slab)
                    break
                begun, filling.page = result
                done += begun
                self._budget -= begun
                if filling.page >= slab_pages:
                    self._pass_done(slab, now_s)
                    break
                if begun == 0 or self._budget >= 1.0:
                    return done  # the engine accepts no more now
        return done

    def _pass_done(self, slab: int, now_s: float) -> None:
        filling = self._slabs[slab]
        filling.page = 0
        filling.due_s = now_s + _PAUSE_S_FIRST * 2.0**filling.passes
        filling.passes += 1
        if filling.passes == _PASSES:
            self.end(slab)
