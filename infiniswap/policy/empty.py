# SPDX-License-Identifier: Apache-2.0
"""Which slabs go back to their donors: those that rest and whose pages were all freed (discard)."""

from __future__ import annotations

from collections.abc import Iterable

EMPTY_S_MAX = 30.0
"""A slab may be empty for so long."""

REST_PAGES_PER_S = 1.0
"""A slab with less activity rests."""


class EmptySince:
    """Since when the slabs of a device have been empty. No I/O, no clock."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}

    def due(self, now_s: float, rests: Iterable[bool]) -> list[int]:
        """The slabs to give back.

        Args:
            now_s: seconds of the clock used throughout.
            rests: for each slab whether it has a donor, holds no page there and rests.
        """
        found = []
        for slab, is_resting in enumerate(rests):
            if not is_resting:
                self._since_s.pop(slab, None)
            elif now_s - self._since_s.setdefault(slab, now_s) > EMPTY_S_MAX:
                found.append(slab)
        return found
