# SPDX-License-Identifier: Apache-2.0
"""Which slab goes to which donor, and when: late binding, two choices, remapping.

The engine never waits for any of this: a write to a slab that is not mapped goes to the backup.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from random import Random

from infiniswap import events
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.ahead import AheadMapper
from infiniswap.device.slabs.counts import SlabCounts
from infiniswap.device.slabs.filling import Filler
from infiniswap.device.slabs.migration import Migration
from infiniswap.engine.protocol import Engine, Event, EventKind, SlabInfo, SlabState
from infiniswap.errors import (
    InfiniswapError,
    RequestRefusedError,
)
from infiniswap.policy.activity import ActivityConfig, ActivityTracker
from infiniswap.policy.ahead import MapAhead
from infiniswap.policy.placement import Ask, Choose, DonorBook, MemoryUse, Placement
from infiniswap.policy.refill import Refill
from infiniswap.units import HostPort

log = logging.getLogger(__name__)

# How often the counters are looked at: soon after I/O begins, rarely when there is none.
_TICK_S_BUSY = 0.1
_TICK_S_IDLE = 0.25
_SKIPPED_MAX = 3  # idle ticks on which the slabs are not looked at: every second they are
_EMPTY_S_MAX = 30.0
_REMOTES_MAX = 64  # of an engine (EngineConfig)


class _Purpose(enum.Enum):
    """Why a slab gets a donor; the values are for the log."""

    NEED = "mapped to"
    MOVE = "moves to"
    AHEAD = "mapped ahead to"


class SlabMapper:
    """Keeps hot slabs mapped. Everything runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        slab_count: int,
        activity: ActivityConfig,
        choices: int,
        rng: Random,
        now_s: float,
        refill: Refill,
        slab_pages: int,
        ahead: MapAhead | None = None,
    ) -> None:
        self.links: list[DonorLink] = []
        self.alarms: dict[str, str] = {}
        self.counts = SlabCounts()
        self.on_connection_lost: Callable[[], None] = lambda: None
        """Called when a connection of the front end, or all of it, may have ended."""
        self.is_eager = False
        """Without a backup an unmapped slab could take no page: every slab is kept mapped."""
        self._engine = engine
        self._choices = choices
        self._rng = rng
        self._tracker = ActivityTracker(slab_count, activity, now_s)
        self._filler = Filler(engine, refill, self.link_of, self.activity, slab_pages)
        self._book: DonorBook[DonorLink] = DonorBook()
        self._ahead = None if ahead is None else AheadMapper(self, engine, ahead)
        self._migration = Migration(self, engine, self._book, slab_pages)
        self._drains: dict[tuple[int, int, int], asyncio.Future[None]] = {}
        self._placing: set[int] = set()
        self._urgent: set[int] = set()
        self._empty_since_s: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._pages_seen = 0
        self._totals = [0] * slab_count
        self._tasks: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------------- donors

    def know(self, donors: Iterable[HostPort], make_link: Callable[[HostPort], DonorLink]) -> None:
        """Who exists now. Who is not among them any more keeps what it has, and gets nothing more.

        Args:
            donors: all of them.
            make_link: for one that is new.
        """
        listed = set(donors)
        known = {link.address for link in self.links}
        for link in self.links:
            link.is_listed = link.address in listed
        new = [make_link(donor) for donor in dict.fromkeys(donors) if donor not in known]
        self.links += new
        if not self._placing:  # which may be about to ask it, or to map there
            for link in [link for link in self.links if not link.is_listed and link.is_idle]:
                self.links.remove(link)
                self._book.forget(link)
                self.alarms.pop(f"donor {link.address}", None)
        if new:
            self._wake.set()

    def lenders(self) -> list[DonorLink]:
        """Those that may be asked for memory."""
        # An engine has so many places for donors; who has one already can take more slabs.
        is_full = sum(link.remote is not None for link in self.links) >= _REMOTES_MAX
        return [
            link
            for link in self.links
            if link.is_listed and link.is_usable and (link.remote is not None or not is_full)
        ]

    def tune(self, activity: ActivityConfig, choices: int, refill_pages_per_s: float) -> None:
        """Other parameters from now on; see __init__."""
        self._tracker.tune(activity)
        self._choices = choices
        self._filler.set_rate(refill_pages_per_s)

    # --------------------------------------------------------------- for the links

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        """Resolves when the engine reports the slab's drain. Ask before unmapping."""
        future = self._drains.get((slab, remote, generation))
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._drains[slab, remote, generation] = future
        return future

    def activity(self, slab: int) -> float:
        """Page I/O per second."""
        return self._tracker.activity(slab)

    def lost(self, slab: int) -> None:
        """A slab that was hot enough for a donor has lost it: another one at once. One that was
        mapped ahead of need was not."""
        if self._ahead is None or not self._ahead.went_back(slab):
            self._urgent.add(slab)
            self._wake.set()

    def arrived(self, slab: int) -> None:
        """A slab has got a donor: what it lacks is copied there from the backup."""
        self._filler.begin(slab)

    def evicted(self, link: DonorLink, slab: int) -> None:
        """A donor has taken a slab back: it is short of memory itself, or others need it."""
        if self._ahead is not None and self._ahead.went_back(slab):
            self.counts.returned += 1
            return
        self.counts.evicted += 1
        self._book.full(link, asyncio.get_running_loop().time())
        self.lost(slab)
        self.arrived(slab)  # where it was moved to, for what had no time to be copied

    def pages_lost(self, pages: int) -> None:
        """So many had no other copy. Reading one is an error from now on, never zeros."""
        self.counts.lost_pages += pages
        self.alarms["lost-pages"] = (
            f"{self.counts.lost_pages} pages are lost with donors that are gone, as there is "
            "no backup"
        )
        log.error("%s", self.alarms["lost-pages"], extra=events.about(events.PAGES_LOST))

    def distrusted(self, link: DonorLink, why: str) -> None:
        """A donor is given up for what it did."""
        wait_s = self._book.distrusted(link, asyncio.get_running_loop().time())
        self.alarms[f"donor {link.address}"] = (
            f"donor {link.address} was given up for {wait_s:.0f} s: {why}"
        )
        log.error(
            "%s",
            self.alarms[f"donor {link.address}"],
            extra=events.about(events.DONOR_DISTRUSTED, donor=link.address),
        )

    # ---------------------------------------------------------------------- events

    def take_events(self) -> None:
        """Drains the engine's events; called when its eventfd is readable."""
        while events := self._engine.events():
            for event in events:
                self._take(event)

    def _take(self, event: Event) -> None:
        match event.kind:
            case EventKind.SLAB_DRAINED:
                future = self._drains.pop((event.slab, event.remote, event.generation), None)
                if future is not None and not future.done():
                    future.set_result(None)
            case EventKind.REMOTE_DOWN:
                for link in self.links:
                    if link.remote == event.remote:
                        link.connections_down(event.code)
                        self._book.unreachable(link, asyncio.get_running_loop().time())
            case EventKind.SLAB_ERROR:
                self._donor_refused(event)
            case EventKind.BAD_PAGE:
                self._bad_page(event)
            case EventKind.BACKUP_FAILING:
                self.alarms["backup"] = f"the backup refuses writes (code {event.code})"
                log.error(
                    "%s; pages stay in staging, writes are retried",
                    self.alarms["backup"],
                    extra=events.about(events.BACKUP_FAILING),
                )
            case EventKind.BACKUP_RECOVERED:
                self.alarms.pop("backup", None)
                log.warning(
                    "the backup takes writes again", extra=events.about(events.BACKUP_RECOVERED)
                )
            case EventKind.OVERFLOW:
                self._resync()
                self.on_connection_lost()
            case EventKind.CONNECTION_LOST:
                self.on_connection_lost()
            case EventKind.FRONTEND_DOWN:
                self.alarms["frontend"] = f"the front end has ended (code {event.code})"
                log.error("%s", self.alarms["frontend"], extra=events.about(events.FRONTEND_DOWN))
                self.on_connection_lost()

    def link_at(self, remote: int | None, slab: int) -> DonorLink | None:
        """Who has the slab there."""
        return next(
            (link for link in self.links if link.remote == remote and slab in link.mapped), None
        )

    def link_of(self, slab: int) -> DonorLink | None:
        """Where it is, not where it comes from."""
        return self.link_at(self._engine.slab(slab).remote, slab)

    def _donor_refused(self, event: Event) -> None:
        link = self.link_at(event.remote, event.slab)
        if link is None or link.mapped[event.slab].generation != event.generation:
            return
        log.warning("slab %d: donor %s refuses it (code %d)", event.slab, link.address, event.code)
        self._book.full(link, asyncio.get_running_loop().time())
        link.refused()
        self.spawn(self.take_off(link, event.slab, "refused"), f"unmap slab {event.slab}")

    async def take_off(self, link: DonorLink, slab: int, reason: str) -> None:
        """Off that donor; the slab is worth another one at once."""
        try:
            await link.unmap(slab, reason)
        except (InfiniswapError, TimeoutError) as error:
            log.warning("slab %d: cannot be taken off donor %s: %s", slab, link.address, error)
        else:
            self.lost(slab)

    def _bad_page(self, event: Event) -> None:
        if not event.code:
            self.alarms["backup-data"] = (
                f"page {event.value} came back from the backup with other bytes"
            )
            log.error("%s", self.alarms["backup-data"], extra=events.about(events.BACKUP_DATA))
            return
        link = self.link_at(event.remote, event.slab)
        if link is not None:
            link.bad_page(event.value)

    def _resync(self) -> None:
        """Events were dropped: whatever they said is read from the state instead."""
        slabs = self._engine.slabs()
        for (slab, remote, generation), future in list(self._drains.items()):
            if not slabs[slab].is_at(remote, generation):
                del self._drains[slab, remote, generation]
                if not future.done():
                    future.set_result(None)
        down = {info.remote for info in self._engine.remotes() if info.state == "down"}
        for link in self.links:
            if link.remote in down:
                link.connections_down(0)

    # ------------------------------------------------------------------------ loop

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the mapper."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self) -> None:
        """The control loop; runs until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._engine.eventfd, self.take_events)
        filling = self.spawn(self._filler.run(), "fill slabs")
        skipped = 0
        try:
            while not filling.done():
                pages = sum(self._engine.pages_moved())
                is_busy = pages != self._pages_seen
                self._pages_seen = pages
                waiting = self._urgent or self.is_eager or self._wake.is_set()
                if is_busy or waiting or skipped == _SKIPPED_MAX:
                    skipped = 0
                    self._wake.clear()
                    await self._look_at_slabs()
                else:
                    # Nothing has moved: the slabs, of which there may be many, need no look.
                    skipped += 1
                    self._tracker.tick(loop.time(), self._totals)
                try:
                    async with asyncio.timeout(_TICK_S_BUSY if is_busy else _TICK_S_IDLE):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            filling.result()  # why it has ended
        finally:
            loop.remove_reader(self._engine.eventfd)
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _look_at_slabs(self) -> None:
        slabs = self._engine.slabs()
        self._totals = [slab.page_ins + slab.page_outs for slab in slabs]
        self._tracker.tick(asyncio.get_running_loop().time(), self._totals)
        await self._map_hot(slabs)
        if self._ahead is not None:
            self._ahead.look(asyncio.get_running_loop().time(), slabs)
        await self._give_back_empty(slabs)
        self._migration.finish(slabs)

    async def _map_hot(self, slabs: Sequence[SlabInfo]) -> None:
        unmapped = [n for n, slab in enumerate(slabs) if slab.state is SlabState.UNMAPPED]
        # Before anything is waited for: what is lost meanwhile must still be urgent next time.
        self._urgent -= {n for n, slab in enumerate(slabs) if slab.state is SlabState.MAPPED}
        urgent = [slab for slab in unmapped if self.is_eager or slab in self._urgent]
        known = set(urgent)
        hot = [slab for slab in self._tracker.hottest(unmapped) if slab not in known]
        for slab in urgent + hot:
            if slab in self._placing:
                continue  # by a move that has been overtaken; once more when that has ended
            if not await self.place(slab):
                self._homeless(len(urgent))
                return  # nobody has room: the next slab would fare no better
            self.counts.remapped += slab in self._urgent
            self._urgent.discard(slab)
        self.alarms.pop("no-donor", None)

    def _homeless(self, count: int) -> None:
        if self.is_eager and "no-donor" not in self.alarms:
            self.alarms["no-donor"] = (
                f"{count} slabs have neither a donor nor a backup: writes to them wait"
            )
            log.error("%s", self.alarms["no-donor"], extra=events.about(events.NO_DONOR))

    async def place(self, slab: int, *, migrates: bool = False) -> bool:
        """Finds a donor for a slab and maps it; False when none has room now."""
        return await self._place_once(slab, _Purpose.MOVE if migrates else _Purpose.NEED)

    async def place_ahead(self, slab: int) -> bool:
        """The same for a slab that nothing was written to: a donor's free slab, or none."""
        return await self._place_once(slab, _Purpose.AHEAD)

    async def _place_once(self, slab: int, purpose: _Purpose) -> bool:
        if slab in self._placing:
            return False
        self._placing.add(slab)
        try:
            return await self._place(slab, purpose)
        finally:
            self._placing.discard(slab)

    async def _place(self, slab: int, purpose: _Purpose) -> bool:
        migrates = purpose is _Purpose.MOVE
        now_s = asyncio.get_running_loop().time()
        usable = [link for link in self.lenders() if slab not in link.mapped]
        eligible = self._book.eligible(usable, now_s)
        holding = [link for link in self.links if link.mapped]
        placement = Placement(eligible, holding, self._rng, self._choices)
        asked: set[DonorLink] = set()
        try:
            while True:
                step = placement.next()
                if isinstance(step, Ask):
                    asked.update(step.donors)
                    answers = await asyncio.gather(
                        *(self._ask(link, purpose) for link in step.donors)
                    )
                    for link, use in zip(step.donors, answers, strict=True):
                        placement.answered(link, use)
                elif isinstance(step, Choose):
                    if await self._map(slab, step.donor, purpose):
                        return True
                    if migrates and self._engine.slab(slab).state is SlabState.UNMAPPED:
                        return False
                    placement.refused(step.donor)
                else:
                    return False
        finally:
            for link in asked:
                await link.let_go()

    async def _ask(self, link: DonorLink, purpose: _Purpose) -> MemoryUse | None:
        now_s = asyncio.get_running_loop().time()
        try:
            use = await link.ask(ahead=purpose is _Purpose.AHEAD)
        except InfiniswapError as error:
            link.detail = str(error)
            self._book.unreachable(link, now_s)
            return None
        link.detail = ""
        if use.slabs_mappable:
            self._book.good(link)
        elif purpose is not _Purpose.AHEAD:  # it may have room all the same
            link.detail = f"no room: the donor {use.no_room}" if use.no_room else "no room"
            self._book.full(link, now_s)
        return use

    async def _map(self, slab: int, link: DonorLink, purpose: _Purpose) -> bool:
        now_s = asyncio.get_running_loop().time()
        migrates, ahead = purpose is _Purpose.MOVE, purpose is _Purpose.AHEAD
        try:
            await link.map(slab, migrates=migrates, ahead=ahead)
        except RequestRefusedError as error:
            if not ahead:
                link.detail = str(error)
                self._book.full(link, now_s)
            return False
        except InfiniswapError as error:
            link.detail = str(error)
            if migrates and self._engine.slab(slab).state is SlabState.UNMAPPED:
                log.info("slab %d: it was taken before it could move", slab)
                return False  # no fault of that donor's
            log.warning("slab %d: cannot be mapped to donor %s: %s", slab, link.address, error)
            self._book.unreachable(link, now_s)
            return False
        log.info("slab %d: %s donor %s", slab, purpose.value, link.address)
        self.counts.mapped += not migrates
        self.alarms.pop(f"donor {link.address}", None)
        return True

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        """See Migration. Of a slab that nothing was written to there is nothing to copy."""
        if self._ahead is not None and self._ahead.is_untouched(slab):
            return False
        return await self._migration.move(link, slab, wait_s)

    async def _give_back_empty(self, slabs: Sequence[SlabInfo]) -> None:
        """A slab whose pages were all freed (discard) and which rests is somebody else's."""
        now_s = asyncio.get_running_loop().time()
        for number, slab in enumerate(slabs):
            rests = (
                not self.is_eager
                and slab.state is SlabState.MAPPED
                and not slab.is_migrating
                and not slab.remote_valid_pages
                and self._tracker.activity(number) < 1.0
            )
            if not rests:
                self._empty_since_s.pop(number, None)
            elif now_s - self._empty_since_s.setdefault(number, now_s) > _EMPTY_S_MAX:
                link = self.link_of(number)
                if link is not None and link.is_usable:
                    await self._unmap_empty(link, number)

    async def _unmap_empty(self, link: DonorLink, slab: int) -> None:
        try:
            await link.unmap(slab, "empty")
            self.counts.returned += 1
            if self._ahead is not None:
                self._ahead.went_back(slab)
        except (InfiniswapError, TimeoutError) as error:
            log.warning("slab %d: cannot be given back: %s", slab, error)

    def slab_states(self) -> dict[str, int]:
        """Count of slabs by state, every state present."""
        counts = Counter(slab.state for slab in self._engine.slabs())
        return {state.name.lower(): counts.get(state, 0) for state in SlabState}
