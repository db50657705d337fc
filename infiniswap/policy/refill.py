# SPDX-License-Identifier: Apache-2.0
"""Which pages are copied from the backup to a donor next, and how many now.

A slab that has just got a donor holds nothing there: until a page is written anew, reading it goes
to the disk. So its pages are copied in the background, the most active slab first, at a bounded
rate that leaves disk and network to the page-ins that somebody waits for.
"""

from __future__ import annotations

from collections.abc import Callable

_PASSES = 2
"""The second finds pages that were being written during the first and did not get there."""

_BURST_S = 0.1
"""So much of the rate may be begun at once after a pause."""


class Refill:
    """Slabs that are being filled. No I/O, no clock.

    Args:
        pages_per_s: rate of all copies together; 0: none.
        now_s: time of the start.
    """

    def __init__(self, pages_per_s: float, now_s: float) -> None:
        if pages_per_s < 0.0:
            raise ValueError(f"a rate of {pages_per_s} pages per second")
        self._pages_per_s = pages_per_s
        self._budget = 0.0
        self._looked_s = now_s
        self._next: dict[int, int] = {}  # by slab
        self._passes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._next)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Those that are being filled."""
        return tuple(self._next)

    def set_rate(self, pages_per_s: float) -> None:
        """Another rate from now on; 0 ends what is under way.

        Raises:
            ValueError: below zero.
        """
        if pages_per_s < 0.0:
            raise ValueError(f"a rate of {pages_per_s} pages per second")
        self._pages_per_s = pages_per_s
        if not pages_per_s:
            self._next.clear()
            self._passes.clear()

    def begin(self, slab: int) -> None:
        """A slab has got a donor, or its donor back: from its first page on."""
        if self._pages_per_s > 0.0:
            self._next[slab] = 0
            self._passes[slab] = _PASSES

    def end(self, slab: int) -> None:
        """It has no donor any more."""
        self._next.pop(slab, None)
        self._passes.pop(slab, None)

    def step(
        self,
        now_s: float,
        activity: Callable[[int], float],
        copy: Callable[[int, int, int], tuple[int, int] | None],
        slab_pages: int,
    ) -> int:
        """Begins what may be begun now; returns how many pages that were.

        Args:
            now_s: seconds of the clock used throughout.
            activity: page I/O per second of a slab; the busiest is filled first.
            copy: of slab, first page, most pages; returns how many were begun and where to go on,
                or None when the slab is not mapped any more.
            slab_pages: pages of a slab.
        """
        burst = max(1.0, self._pages_per_s * _BURST_S)
        elapsed_s = max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        self._budget = min(burst, self._budget + elapsed_s * self._pages_per_s)
        done = 0
        for slab in sorted(self._next, key=lambda slab: (-activity(slab), slab)):
            while slab in self._next and self._budget >= 1.0:
                result = copy(slab, self._next[slab], int(self._budget))
                if result is None:
                    self.end(slab)
                    break
                begun, following = result
                done += begun
                self._budget -= begun
                if following < slab_pages:
                    self._next[slab] = following
                    if begun == 0 or self._budget >= 1.0:
                        return done  # the engine takes no more now
                    break
                self._pass_done(slab)
        return done

    def _pass_done(self, slab: int) -> None:
        self._passes[slab] -= 1
        self._next[slab] = 0
        if not self._passes[slab]:
            self.end(slab)
