# SPDX-License-Identifier: Apache-2.0
"""Gives slabs back to their donors whose pages were all freed (discard) and which rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.engine.protocol import SlabInfo, SlabState
from infiniswap.errors import InfiniswapError
from infiniswap.policy.empty import REST_PAGES_PER_S, EmptySince

log = logging.getLogger(__name__)


class EmptySlabs:
    """A part of the mapper. Everything runs on the event loop.

    Args:
        known_donors: the donors.
        activity: page I/O per second of a slab.
        returned: told of each slab that was given back.
    """

    def __init__(
        self,
        known_donors: KnownDonors,
        activity: Callable[[int], float],
        returned: Callable[[int], None],
    ) -> None:
        self._known_donors = known_donors
        self._activity = activity
        self._returned = returned
        self._empty = EmptySince()

    async def look(self, slabs: Sequence[SlabInfo]) -> None:
        """Gives back what has been empty and at rest for half a minute."""
        rests = [
            slab.state is SlabState.MAPPED
            and not slab.is_migrating
            and not slab.remote_valid_pages
            and self._activity(number) < REST_PAGES_PER_S
            for number, slab in enumerate(slabs)
        ]
        for number in self._empty.due(asyncio.get_running_loop().time(), rests):
            await self._give_back(number)

    async def _give_back(self, slab: int) -> None:
        link = self._known_donors.of(slab)
        if link is None or not link.is_usable:
            return
        try:
            if await link.unmap(slab, "empty"):
                self._returned(slab)
        except (InfiniswapError, TimeoutError) as error:
            log.warning("slab %d: cannot be given back: %s", slab, error)
