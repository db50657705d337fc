# SPDX-License-Identifier: Apache-2.0
"""Finds a donor for a slab and maps it there: asks donors as infiniswap.policy.placement says."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence
from random import Random

from infiniswap.config import PolicyConfig
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.asked import AskedDonors
from infiniswap.device.slabs.counts import SlabCounts
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.device.slabs.tasks import Tasks
from infiniswap.engine.protocol import Engine, SlabState
from infiniswap.errors import InfiniswapError, RequestRefusedError
from infiniswap.policy.placement import Ask, Choose, MemoryUse, Placement
from infiniswap.ticks import loop_now_s

log = logging.getLogger(__name__)


class Purpose(enum.Enum):
    """Why a slab gets a donor; the values are for the log."""

    NEED = "mapped to"
    """It is hot, or has lost its donor."""
    MOVE = "moves to"
    """Its donor wants it back. It stays there as well until its pages are copied."""
    AHEAD = "mapped ahead to"
    """Nothing is written to it yet: a donor's free slab, or none."""


class Placer:
    """A part of the mapper. Everything runs on the event loop.

    Args:
        engine: is told by the links; here it is only asked.
        known_donors: the donors.
        policy: [policy] of the configuration; a reload replaces it.
        rng: source of randomness.
        counts: of the device.
        tasks: of the mapper.
    """

    def __init__(
        self,
        engine: Engine,
        known_donors: KnownDonors,
        policy: PolicyConfig,
        rng: Random,
        counts: SlabCounts,
        tasks: Tasks,
    ) -> None:
        self.policy = policy
        self._engine = engine
        self._known_donors = known_donors
        self._backoff = known_donors.backoff
        self._rng = rng
        self._counts = counts
        self._asked = AskedDonors(known_donors, tasks)

    def is_placing(self, slab: int) -> bool:
        """Whether a donor is being found for it."""
        return slab in self._known_donors.searches

    async def place(self, slab: int, purpose: Purpose = Purpose.NEED) -> bool:
        """Finds a donor for a slab and maps it.

        Returns:
            False when no donor has room now, or another task is placing this slab already.
        """
        if self.is_placing(slab):
            return False
        self._known_donors.searches.add(slab)
        found = False
        try:
            found = await self._search(slab, purpose)
        finally:
            self._known_donors.searches.discard(slab)
            self._asked.search_ended(found=found)
        return found

    async def _search(self, slab: int, purpose: Purpose) -> bool:
        usable = [link for link in self._known_donors.usable() if slab not in link.mapped]
        placement = self._placement(usable, self._holding(), self._asked.take_next())
        while True:
            step = placement.next()
            if isinstance(step, Ask):
                answers = await asyncio.gather(*(self._ask(link, purpose) for link in step.donors))
                for link, use in zip(step.donors, answers, strict=True):
                    placement.answered(link, use)
            elif isinstance(step, Choose):
                self._draw_next(step.donor)
                if await self._map(slab, step.donor, purpose):
                    return True
                if self._was_taken(slab, purpose):
                    return False
                placement.refused(step.donor)
            else:
                return False

    def _holding(self) -> list[DonorLink]:
        return [link for link in self._known_donors.links if link.mapped]

    def _placement(
        self, usable: list[DonorLink], holding: list[DonorLink], drawn: Sequence[DonorLink] = ()
    ) -> Placement[DonorLink]:
        now_s = loop_now_s()

        def may_ask(link: DonorLink) -> bool:
            return self._backoff.is_eligible(link, now_s)

        return Placement(usable, holding, self._rng, self.policy, may_ask, drawn)

    def _draw_next(self, chosen: DonorLink) -> None:
        """Draws whom the next slab will ask, once this one has been mapped to `chosen`."""
        if self._asked.grows:
            holding = [*self._holding(), chosen]
            step = self._placement(self._known_donors.usable(), holding).next()
            self._asked.open(step.donors if isinstance(step, Ask) else ())

    async def _ask(self, link: DonorLink, purpose: Purpose) -> MemoryUse | None:
        now_s = loop_now_s()
        if not await self._asked.may_ask(link):
            return None
        try:
            use = await link.ask(ahead=purpose is Purpose.AHEAD)
        except InfiniswapError as error:
            self._known_donors.unreachable(link, error, now_s)
            return None
        link.detail = ""
        if use.slabs_mappable:
            self._backoff.good(link)
        elif purpose is not Purpose.AHEAD:  # it may still have room
            link.detail = f"no room: the donor {use.no_room}" if use.no_room else "no room"
            self._backoff.full(link, now_s)
        return use

    async def _map(self, slab: int, link: DonorLink, purpose: Purpose) -> bool:
        now_s = loop_now_s()
        migrates, ahead = purpose is Purpose.MOVE, purpose is Purpose.AHEAD
        try:
            await link.map(slab, migrates=migrates, ahead=ahead)
        except RequestRefusedError as error:
            if not ahead:
                link.detail = str(error)
                self._backoff.full(link, now_s)
            return False
        except InfiniswapError as error:
            link.detail = str(error)
            if self._was_taken(slab, purpose):
                log.info("slab %d: it was taken before it could move", slab)
                return False  # no fault of that donor's
            log.warning("slab %d: cannot be mapped to donor %s: %s", slab, link.address, error)
            self._backoff.unreachable(link, now_s)
            return False
        log.info("slab %d: %s donor %s", slab, purpose.value, link.address)
        self._counts.mapped += not migrates
        self._known_donors.took(link)
        return True

    def _was_taken(self, slab: int, purpose: Purpose) -> bool:
        """Whether a slab that is to move has lost its donor meanwhile: nothing is left to move."""
        return purpose is Purpose.MOVE and self._engine.slab(slab).state is SlabState.UNMAPPED
