# SPDX-License-Identifier: Apache-2.0
"""Which slabs get a donor before the kernel writes to them.

A job that begins to page out writes some hundred MiB per second. The kernel goes through a swap
area from its beginning to its end before it uses freed places again, so the slab that it writes to
next is known. If that slab were mapped only once it is hot, it would get its donor a tick and two
round trips late, and the pages written until then would have to be read from the disk.

A slab that was mapped ahead and stays untouched goes back to its donor. It is not mapped ahead
again before the front has moved on by a part of a slab: otherwise a job that pages out slowly would
take and return it as long as it runs. For a job that has not paged out for a while, nothing is
mapped ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

from infiniswap.policy.ewma import Ewma

_RETRY_S_MIN = 0.25
_RETRY_S_MAX = 2.0
"""Pause after no donor had a free slab. A donor may be making one, or have none for the whole
job."""


class Binding(Enum):
    """What a slab is to the code that maps ahead."""

    UNMAPPED = "unmapped"
    EMPTY = "empty"
    """It has a donor, and nothing was ever written to it there."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class AheadConfig:
    """How far ahead.

    Attributes:
        ahead_s: seconds of page-out, at the present pace, that mapped slabs must have room for.
        slabs_min: at least so many slabs.
        pace_s: the pace is an average over about this time.
        again_share: share of a slab's pages that must be paged out before slabs that went back
            untouched are mapped again.
        idle_s: after this time without page-out nothing is mapped ahead.
    """

    ahead_s: float = 2.0
    slabs_min: int = 2
    pace_s: float = 0.5
    again_share: float = 0.125
    idle_s: float = 30.0

    def __post_init__(self) -> None:
        if self.ahead_s < 0.0 or self.slabs_min < 0 or not 0.0 <= self.again_share <= 1.0:
            raise ValueError(f"{self} is out of bounds")
        if self.pace_s <= 0.0:
            raise ValueError(f"an average over {self.pace_s} s")


class MapAhead:
    """Follows the page-out front of one range of a device: its swap area, or far memory, whose
    blocks are given lowest first. No I/O, no clock.

    Args:
        slab_count: slabs of the range.
        slab_pages: pages of a slab.
        config: how far ahead.
    """

    def __init__(self, slab_count: int, slab_pages: int, config: AheadConfig | None = None) -> None:
        self._config = config or AheadConfig()
        self._slab_pages = slab_pages
        self._outs: Sequence[int] = [0] * slab_count
        self._looked_s: float | None = None
        self._moved_s = 0.0
        self._pace = Ewma(0.5, self._config.pace_s)
        self._front = slab_count - 1  # so that the first slab is next
        self._again_pages = 0
        self._retry_s = float("-inf")
        self._wait_s = _RETRY_S_MIN

    @property
    def slab_count(self) -> int:
        """Slabs of the range."""
        return len(self._outs)

    @property
    def pages_per_s(self) -> float:
        """Present pace of page-out."""
        return self._pace.value or 0.0

    @property
    def slabs_wanted(self) -> int:
        """How many slabs beyond the front should have a donor."""
        pages = self.pages_per_s * self._config.ahead_s
        return min(max(self._config.slabs_min, ceil(pages / self._slab_pages)), len(self._outs))

    def went_back(self) -> None:
        """Slabs went back: they were untouched for long, or a donor took them back."""
        self._again_pages = sum(self._outs) + ceil(self._config.again_share * self._slab_pages)

    def mapped(self) -> None:
        """A slab was mapped."""
        self._wait_s = _RETRY_S_MIN

    def refused(self, now_s: float) -> None:
        """No donor had a free slab."""
        self._retry_s = now_s + self._wait_s
        self._wait_s = min(2.0 * self._wait_s, _RETRY_S_MAX)

    def next(self, now_s: float, outs: Sequence[int], bindings: Sequence[Binding]) -> list[int]:
        """The slabs to map now, in their order; they may only take free slabs of donors.

        Args:
            now_s: seconds of the clock used throughout.
            outs: pages ever paged out, by slab. A total that went down begins at zero again.
            bindings: by slab.

        Raises:
            ValueError: not one number and one binding per slab.
        """
        if not len(outs) == len(bindings) == len(self._outs):
            raise ValueError(f"{len(outs)} totals, {len(bindings)} bindings, {len(self._outs)}")
        self._follow(now_s, outs)
        is_idle = now_s > self._moved_s + self._config.idle_s
        if is_idle or now_s < self._retry_s or sum(outs) < self._again_pages:
            return []
        count = len(outs)
        room = [
            slab
            for slab in ((self._front + step) % count for step in range(1, count + 1))
            if bindings[slab] is not Binding.OTHER
        ][: self.slabs_wanted]
        return [slab for slab in room if bindings[slab] is Binding.UNMAPPED]

    def _follow(self, now_s: float, outs: Sequence[int]) -> None:
        grown = [
            now - was if now >= was else now for now, was in zip(outs, self._outs, strict=True)
        ]
        if self._looked_s is not None and now_s > self._looked_s:
            self._pace.update(now_s, sum(grown) / (now_s - self._looked_s))
        elif self._looked_s is not None:
            return  # no time has passed: these pages count the next time
        else:
            self._moved_s = now_s  # a job that begins may page out soon
        self._looked_s = now_s
        self._outs = list(outs)
        busiest = max(range(len(grown)), key=lambda slab: (grown[slab], slab), default=0)
        if grown and grown[busiest]:
            self._front = busiest
            self._moved_s = now_s
