# SPDX-License-Identifier: Apache-2.0
"""Slabs that devices have mapped ahead and not used: lent, but the first to be taken back.

A device says when it uses one (KeepRequest). What stands here may be out of date by that message:
a slab in use that is taken back all the same is evicted as any other, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from infiniswap.control import messages as m
from infiniswap.donor.evict import Evictor, MappedSlab
from infiniswap.donor.leases import LeaseTable

log = logging.getLogger(__name__)


class MappedAhead:
    """Which slabs those are.

    Args:
        table: leases.
        evictor: takes slabs back.
    """

    def __init__(self, table: LeaseTable, evictor: Evictor) -> None:
        self._table = table
        self._evictor = evictor
        self._generations: dict[MappedSlab, int] = {}
        self._waiting = 0

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a slab that is about to be free: it is no spare one."""
        return self._waiting > 0

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """While somebody does."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def mapped(self, lease: int, slot: m.SlotInfo) -> None:
        """A slab was mapped ahead."""
        self._generations[lease, slot.slot] = slot.generation

    def used(self, lease: int, slot: int, generation: int) -> None:
        """Its device uses it now."""
        if self._generations.get((lease, slot)) == generation:
            del self._generations[lease, slot]

    def slabs(self) -> list[MappedSlab]:
        """Those that are there still, and unused."""
        for slab, generation in list(self._generations.items()):
            lease, slot = slab
            entry = self._table.get(lease)
            info = entry.slots.get(slot) if entry else None
            if info is None or info.generation != generation:
                del self._generations[slab]
        return list(self._generations)

    async def make_room(self, lease: int) -> bool:
        """Takes one back for a lease that asks: its own first, as it has the choice between both.

        Returns:
            False: there was none.
        """
        untouched = self.slabs()
        own = [slab for slab in untouched if slab[0] == lease]
        if not untouched or not await self._evictor.evict(1, among=own or untouched):
            return False
        log.info("a slab that was mapped ahead and not used was taken back for lease %d", lease)
        return True
