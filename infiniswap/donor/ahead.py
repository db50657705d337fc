# SPDX-License-Identifier: Apache-2.0
"""Slabs that devices have mapped ahead and not used: lent, but the first to be taken back.

A device says when it begins to use one (KeepRequest). Until that message arrives a slab in use may
still be taken back: it is evicted like any other, and nothing is lost.
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
    """Slabs that were mapped ahead and are not used yet.

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
        """Whether a device waits for the next free slab, so that it is no spare one."""
        return self._waiting > 0

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """While the block lasts a device waits for a slab."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def mapped(self, lease: int, slot: m.SlotInfo) -> None:
        """A slab was mapped ahead."""
        self._generations[lease, slot.slot] = slot.generation

    def used(self, lease: int, slot: int, generation: int) -> None:
        """The device of the lease uses that slab from now on."""
        if self._generations.get((lease, slot)) == generation:
            del self._generations[lease, slot]

    def slabs(self) -> list[MappedSlab]:
        """Those that are still lent and unused."""
        for slab, generation in list(self._generations.items()):
            lease, slot = slab
            entry = self._table.get(lease)
            info = entry.slots.get(slot) if entry else None
            if info is None or info.generation != generation:
                del self._generations[slab]
        return list(self._generations)

    async def make_room(self, lease: int) -> bool:
        """Takes one back for a lease that asks, from that lease first: then no other device loses
        a slab.

        Returns:
            False if there was none.
        """
        untouched = self.slabs()
        own = [slab for slab in untouched if slab[0] == lease]
        if not untouched or not await self._evictor.evict(1, among=own or untouched):
            return False
        log.info("a slab that was mapped ahead and not used was taken back for lease %d", lease)
        return True
