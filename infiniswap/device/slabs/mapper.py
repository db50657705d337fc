# SPDX-License-Identifier: Apache-2.0
"""The control loop over a device's slabs: when one gets a donor, loses it, or goes back.

The engine never waits for any of this: a write to a slab that is not mapped goes to the backup.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from random import Random

from infiniswap import events
from infiniswap.config import PolicyConfig
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.ahead import AheadMapper
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.slabs.counts import SlabCounts
from infiniswap.device.slabs.empty import EmptySlabs
from infiniswap.device.slabs.engine_events import EngineEvents
from infiniswap.device.slabs.filling import Filler
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.device.slabs.migration import Migration
from infiniswap.device.slabs.placer import Placer
from infiniswap.device.slabs.tasks import Tasks
from infiniswap.engine.protocol import Engine, SlabInfo, SlabState
from infiniswap.errors import InfiniswapError
from infiniswap.policy.activity import ActivityTracker
from infiniswap.policy.ahead import MapAhead
from infiniswap.policy.refill import Refill
from infiniswap.ticks import tick_pause_s
from infiniswap.units import counted

log = logging.getLogger(__name__)

# How often the slabs are looked at. When a device that rests is used, the engine reports it.
_TICK_S_BUSY = 0.1
_TICK_S_WAITING = 0.25  # a slab wants a donor and has found none
_TICK_S_RESTING = 1.0


class SlabMapper:
    """Keeps hot slabs mapped. Everything runs on the event loop.

    Args:
        engine: of the device.
        slab_count: slabs of the device.
        policy: [policy] of the configuration.
        rng: source of randomness.
        now_s: time of the start.
        refill: says what is copied from the backup next.
        slab_pages: pages of a slab.
        ahead: say which slabs are mapped before they are hot, each of a range of the device.

    Attributes:
        rests: no page has come in or gone out since the last look.
        is_eager: every slab is kept mapped, because without a backup an unmapped one takes no page.
    """

    def __init__(
        self,
        engine: Engine,
        slab_count: int,
        policy: PolicyConfig,
        rng: Random,
        now_s: float,
        refill: Refill,
        slab_pages: int,
        ahead: Sequence[MapAhead] = (),
    ) -> None:
        self.rests = False
        self.is_eager = False
        self.alarms = Alarms()
        self.counts = SlabCounts()
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        self.known_donors = KnownDonors(engine, self.alarms, self._wake)
        self.placer = Placer(engine, self.known_donors, policy, rng, self.counts, self._tasks)
        self.events = EngineEvents(engine, self.known_donors, self.alarms, self._refused)
        self._engine = engine
        self._tracker = ActivityTracker(slab_count, policy, now_s)
        self._filler = Filler(engine, refill, self.known_donors.of, self.activity, slab_pages)
        self._empty = EmptySlabs(self.known_donors, self.activity, self._returned)
        self._migration = Migration(
            *(engine, self.known_donors, self.placer, self._tasks, self.counts),
            take_off=self.take_off,
            slab_pages=slab_pages,
        )
        self._ahead = None
        if ahead:
            self._ahead = AheadMapper(engine, self.known_donors, self.placer, self._tasks, ahead)
        self._urgent: set[int] = set()
        self._pages_seen = 0
        self.events.on_use.append(self._used)

    def tune(self, policy: PolicyConfig, refill_pages_per_s: float) -> None:
        """Uses other parameters from now on."""
        self._tracker.tune(policy)
        self.placer.policy = policy
        self._filler.set_rate(refill_pages_per_s)

    def slab_states(self) -> dict[str, int]:
        """Count of slabs by state, every state present."""
        counts = Counter(slab.state for slab in self._engine.slabs())
        return {state.name.lower(): counts.get(state, 0) for state in SlabState}

    # ------------------------------------------------- for the links (link_types.Slabs)

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        """Resolves when the engine reports the slab's drain. Ask before unmapping."""
        return self.events.drained(slab, remote, generation)

    def activity(self, slab: int) -> float:
        """Page I/O per second."""
        return self._tracker.activity(slab)

    def lost(self, slab: int) -> None:
        """A slab has lost its donor: it gets another one at once, as it was hot enough for one.
        One that was mapped ahead and is untouched gets none."""
        if not self._was_untouched(slab):
            self._urgent.add(slab)
            self._wake.set()

    def arrived(self, slab: int) -> None:
        """A slab has got a donor: what it lacks is copied there from the backup."""
        self._filler.begin(slab)

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        """See Migration. An untouched slab has nothing to copy."""
        if self._ahead is not None and self._ahead.is_untouched(slab):
            return False
        return await self._migration.move(link, slab, wait_s)

    def evicted(self, link: DonorLink, slab: int) -> None:
        """A donor has taken a slab back: it is short of memory itself, or others need it."""
        if self._was_untouched(slab):
            self.counts.returned += 1
            return
        self.counts.evicted += 1
        self.known_donors.backoff.full(link, asyncio.get_running_loop().time())
        self.lost(slab)
        self.arrived(slab)  # where it was moved to, for what had no time to be copied

    def distrusted(self, link: DonorLink, why: str) -> None:
        """A donor is given up for its faults."""
        self.known_donors.distrusted(link, why)

    def avoided(self, link: DonorLink, why: str) -> None:
        """A donor with faults keeps what only it has."""
        self.known_donors.avoided(link, why)

    def pages_lost(self, pages: int, why: str) -> None:
        """So many pages had no other copy. Reading one is an error from now on, never zeros."""
        self.counts.lost_pages += pages
        lost = self.counts.lost_pages
        self.alarms.sound(
            "lost-pages",
            f"{counted(lost, 'page')} {'is' if lost == 1 else 'are'} lost {why}"
            ", as there is no backup",
            events.PAGES_LOST,
        )

    def _was_untouched(self, slab: int) -> bool:
        """Of a slab that has no donor now: whether it was mapped ahead, and nothing written."""
        return self._ahead is not None and self._ahead.went_back(slab)

    # ------------------------------------------------------------- for the mapper's parts

    def _refused(self, link: DonorLink, slab: int) -> None:
        self._tasks.spawn(self.take_off(link, slab, "refused"), f"unmap slab {slab}")

    async def take_off(self, link: DonorLink, slab: int, reason: str) -> None:
        """Takes a slab off a donor; it gets another one at once."""
        try:
            await link.unmap(slab, reason)
        except (InfiniswapError, TimeoutError) as error:
            log.warning("slab %d: cannot be taken off donor %s: %s", slab, link.address, error)
        else:
            self.lost(slab)

    def _returned(self, slab: int) -> None:
        self.counts.returned += 1
        self._was_untouched(slab)

    # ------------------------------------------------------------------------ loop

    async def run(self) -> None:
        """The control loop; runs until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._engine.eventfd, self.events.take)
        filling = self._tasks.spawn(self._filler.run(), "fill slabs")
        try:
            while not filling.done():
                self._wake.clear()
                pages = sum(self._engine.pages_moved())
                self.rests = pages == self._pages_seen
                self._pages_seen = pages
                if self.rests:
                    self._engine.report_use()
                await self._look_at_slabs()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(loop.time())):
                        await self._wake.wait()
            filling.result()  # why it has ended
        finally:
            loop.remove_reader(self._engine.eventfd)
            await self._tasks.close()

    def _used(self) -> None:
        self.rests = False
        self._pages_seen = -1  # what was asked for may not be counted yet
        self._wake.set()

    def _pause_s(self, now_s: float) -> float:
        if not self.rests:
            return _TICK_S_BUSY
        if self._urgent or "no-donor" in self.alarms:
            return _TICK_S_WAITING
        return tick_pause_s(now_s, _TICK_S_RESTING)

    async def _look_at_slabs(self) -> None:
        slabs = self._engine.slabs()
        totals = [slab.page_ins + slab.page_outs for slab in slabs]
        self._tracker.tick(asyncio.get_running_loop().time(), totals)
        await self._map_hot(slabs)
        if self._ahead is not None:
            self._ahead.look(asyncio.get_running_loop().time(), slabs)
        if not self.is_eager:
            await self._empty.look(slabs)
        self._migration.finish(slabs)
        self.known_donors.forget()

    async def _map_hot(self, slabs: Sequence[SlabInfo]) -> None:
        unmapped = [n for n, slab in enumerate(slabs) if slab.state is SlabState.UNMAPPED]
        # Before the first await: what is lost during one must still be urgent next time.
        self._urgent -= {n for n, slab in enumerate(slabs) if slab.state is SlabState.MAPPED}
        urgent = [slab for slab in unmapped if self.is_eager or slab in self._urgent]
        known = set(urgent)
        hot = [slab for slab in self._tracker.hottest(unmapped) if slab not in known]
        for slab in urgent + hot:
            if self.placer.is_placing(slab):
                continue  # by a move that has been overtaken; once more when that has ended
            if not await self.placer.place(slab):
                self._homeless(len(urgent))
                return  # no donor has room, and so none for the next slab
            self.counts.remapped += slab in self._urgent
            self._urgent.discard(slab)
        self.alarms.pop("no-donor", None)

    def _homeless(self, count: int) -> None:
        if self.is_eager and "no-donor" not in self.alarms:
            has = "slab has" if count == 1 else "slabs have"
            sentence = f"{count} {has} neither a donor nor a backup: writes to them wait"
            self.alarms.sound("no-donor", sentence, events.NO_DONOR)
