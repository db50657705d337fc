# SPDX-License-Identifier: Apache-2.0
"""A device's mapper over the stepped engine, with donors that do what they are asked.

In virtual time (`virtual_time.run`): a minute of a device takes some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from infiniswap.config import PolicyConfig
from infiniswap.control.messages import REFUSED_BUSY
from infiniswap.device.donors.lease import Place
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.engine.protocol import EngineConfig, SlabState
from infiniswap.errors import EngineError, NoDonorError, RequestRefusedError
from infiniswap.policy.ahead import MapAhead
from infiniswap.policy.placement import MemoryUse
from infiniswap.policy.refill import Refill
from infiniswap.units import PAGE_BYTES, HostPort
from support.devices.stepped_engine import SimEngine, lib

SLAB_PAGES = 16
_SLOTS = 64
_ANSWER_S = 0.001
_STEP_S = 0.01
_STEP_S_IDLE = 0.05
_BACKUP_STEPS = (
    (lib.ISW_STEP_UNPLUG, 0),
    (lib.ISW_STEP_BACKUP_TAKE, 0),
    (lib.ISW_STEP_BACKUP_TAKE, 1),
    (lib.ISW_STEP_BACKUP_DONE, 0),
)


class ObedientLink:
    """In place of a DonorLink, with its donor.

    Attributes:
        room: slabs that it can take on besides those that it has.
        is_reachable: otherwise nothing that it is asked is answered.
        is_stuck: no transfer to it ends.
        is_busy: it refuses every slab after it has said that it has room.
        asked: how often it was asked for its memory use.
        done: what was done with slabs here, as (what, slab).
        told: what the mapper has told it.
    """

    def __init__(self, world: SlabWorld, address: HostPort, room: int = 100) -> None:
        self.address = address
        self.remote: int | None = None
        self.mapped: dict[int, Place] = {}
        self.detail = ""
        self.is_listed = self.is_usable = self.is_reachable = True
        self.is_busy = self.is_stuck = False
        self.room = room
        self.used_share = 0.5
        self.no_room = ""
        self.config = SimpleNamespace(has_backup=world.has_backup)
        self.asked = 0
        self.answer_s = _ANSWER_S
        self.sessions_opened = 0
        self.has_session = False
        self.done: list[tuple[str, int]] = []
        self.told: list[tuple[Any, ...]] = []
        self._world = world
        self._generation = 0
        self._left: set[Place] = set()

    @property
    def is_idle(self) -> bool:
        return not self.mapped and not self.has_session

    async def _answer(self) -> None:
        await asyncio.sleep(self.answer_s)
        if not self.is_reachable:
            raise NoDonorError("no answer", where=f"donor {self.address}")

    async def ask(self, *, ahead: bool) -> MemoryUse:
        self.asked += 1
        await self.open()
        await self._answer()
        return MemoryUse(self.used_share, self.room, self.no_room)

    async def open(self) -> None:
        if not self.has_session:
            await self._answer()
            self.sessions_opened += 1
            self.has_session = True

    async def map(self, slab: int, *, migrates: bool, ahead: bool) -> None:
        await self.open()
        await self._answer()
        if self.is_busy or not self.room:
            raise RequestRefusedError("it has no slab for that", reason=REFUSED_BUSY)
        engine = self._world.engine
        if self.remote is None:
            self.remote = engine.remote(1, _SLOTS)
        slot = min(set(range(_SLOTS)) - {place.slot for place in self.mapped.values()})
        self._generation += 1
        put = engine.slab_migrate if migrates else engine.slab_map
        try:
            put(slab, self.remote, slot, self._generation)
        except EngineError as error:
            raise NoDonorError(str(error)) from error
        self.room -= 1
        self.mapped[slab] = Place(slot, self._generation)
        self.done.append(("take" if migrates else "map", slab))
        if not migrates and slab in self._world.lost:
            self._world.remapped += 1
            self._world.lost.discard(slab)
        self._world.mapper.arrived(slab)

    async def let_go(self) -> None:
        self.has_session = self.remote is not None

    async def keep(self, slab: int) -> bool:
        self.told.append(("keep", slab))
        return True

    async def unmap(self, slab: int, reason: str) -> bool:
        if slab not in self.mapped or not await self._drain(slab):
            return False
        self.done.append((reason, slab))
        self._world.lost.add(slab)
        self._world.lost -= {slab} if reason == "empty" else set()
        return True

    def pages(self, slab: int) -> int:
        """Pages of a slab that are valid here; of one that drains already, none."""
        assert self.remote is not None
        with contextlib.suppress(EngineError):
            generation = self.mapped[slab].generation
            return self._world.engine.slab_pages_at(slab, self.remote, generation)[0]
        return 0

    async def _drain(self, slab: int) -> bool:
        engine, place, remote = self._world.engine, self.mapped[slab], self.remote
        assert remote is not None
        with contextlib.suppress(EngineError):  # somebody else has begun it
            engine.slab_unmap(slab, remote, place.generation)
        if engine.slab(slab).is_at(remote, place.generation):
            drained = self._world.mapper.drained(slab, remote, place.generation)
            await asyncio.wait({drained}, timeout=30.0)
            assert drained.done(), f"slab {slab} does not drain"
        if self.mapped.get(slab) != place:
            return False
        del self.mapped[slab]
        self.room += 1
        return True

    def connections_down(self, code: int) -> None:
        self.told.append(("down", code))

    def refused(self) -> None:
        self.told.append(("refused",))

    def bad_page(self, page: int) -> None:
        self.told.append(("bad page", page))

    # ------------------------------------------------------ what the donor itself does

    async def evict(self, slab: int, move_s: float = 3.0) -> bool:
        """Takes a slab back; returns whether every page was copied elsewhere first."""
        self.room = -1 - len(self.mapped)
        moved = await self._world.mapper.move(cast(Any, self), slab, move_s)
        if not moved and not self._world.has_backup:
            return False  # it has the only copies
        if slab in self.mapped:
            assert not moved or self.pages(slab) == 0
            if self.mapped[slab] not in self._left:  # others may have asked for it, too
                self._left.add(self.mapped[slab])
                is_source = self._world.engine.slab(slab).source_remote == self.remote
                is_cut = is_source and self.pages(slab)
                self.done += [("whole", slab)] if moved else [("cut", slab)] if is_cut else []
            if await self._drain(slab):
                self.done.append(("evicted", slab))
                self._world.lost.add(slab)
                self._world.mapper.evicted(cast(Any, self), slab)
        return moved

    async def die(self) -> None:
        """All of its slabs are lost."""
        self.is_reachable = False
        if self.remote is not None:
            self._world.engine.step(lib.ISW_STEP_REMOTE_DOWN, self.remote)
            self._world.mapper.events.take()
            for slab in list(self.mapped):
                if await self._drain(slab):
                    self.done.append(("lost", slab))
                    self._world.lost.add(slab)
                    self._world.mapper.lost(slab)
            self._world.engine.remote_destroy(self.remote)
            self.remote = None


class SlabWorld:
    """One device; `live()` runs its mapper, its donors and its disk.

    Args:
        slabs: of the device.
        has_backup: otherwise every slab is kept mapped.
        ahead: whether slabs are mapped ahead of the page-out front.
        ranges: slabs of each range that has a front of its own; empty: there is one.
        policy: of the configuration.
        refill_pages_per_s: 0: nothing is copied from the backup.
        seed: of what is drawn.
    """

    def __init__(
        self,
        slabs: int = 4,
        *,
        has_backup: bool = True,
        ahead: bool = False,
        ranges: tuple[int, ...] = (),
        policy: PolicyConfig | None = None,
        refill_pages_per_s: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.slabs = slabs
        self.has_backup = has_backup
        self.engine = SimEngine(
            EngineConfig(
                size_bytes=slabs * SLAB_PAGES * PAGE_BYTES,
                slab_bytes=SLAB_PAGES * PAGE_BYTES,
                staging_pages=64,
                request_bytes_max=SLAB_PAGES * PAGE_BYTES,
                requests_max=64,
                no_backup=not has_backup,
            )
        )
        self.mapper = SlabMapper(
            self.engine,
            slabs,
            policy or PolicyConfig(period_s=0.1, activity_alpha=0.5, hot_pages_per_s=20.0),
            Random(seed),
            0.0,
            Refill(refill_pages_per_s, 0.0),
            SLAB_PAGES,
            [MapAhead(count, SLAB_PAGES) for count in ranges or (slabs,)] if ahead else (),
        )
        self.mapper.is_eager = not has_backup
        self.links: list[ObedientLink] = []
        self.lost: set[int] = set()
        """Slabs that have lost their donor and have had no other one since."""
        self.remapped = 0

    def donors(self, *rooms: int) -> list[ObedientLink]:
        """More donors, with so much room; returns these."""
        new = [
            ObedientLink(self, HostPort(f"10.0.0.{number}", 1), room)
            for number, room in enumerate(rooms, len(self.links) + 1)
        ]
        self.links += new
        made = {link.address: cast(Any, link) for link in self.links}
        self.mapper.known_donors.know(list(made), made.__getitem__)
        return new

    @contextlib.asynccontextmanager
    async def live(self, *rooms: int, agrees: bool = True) -> AsyncIterator[list[ObedientLink]]:
        """Everything runs meanwhile, with donors that have so much room, and agrees in the end."""
        links = self.donors(*rooms)
        running = {
            asyncio.create_task(self._run_engine(), name="engine"),
            asyncio.create_task(self.mapper.run(), name="mapper"),
        }
        try:
            yield links
            for task in running:
                assert not task.done(), task.exception()
            if agrees:
                self.check()
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            self.engine.close()

    async def _run_engine(self) -> None:
        while True:  # until cancelled
            pause_s = _STEP_S if self.step() else _STEP_S_IDLE
            await asyncio.sleep(pause_s)

    def step(self) -> bool:
        """Every transfer that is under way ends well; returns whether there was one."""
        was_going, is_going = False, True
        while is_going:
            is_going = False
            for link in self.links:
                if link.remote is not None and not link.is_stuck:
                    is_going |= self.engine.step(lib.ISW_STEP_REMOTE_REPLY, link.remote)
            for kind, n in _BACKUP_STEPS:
                is_going |= self.engine.step(kind, n)
            while (done := self.engine.reap()) is not None:
                assert not done.error or not self.has_backup, done
            was_going |= is_going
        return was_going

    def submit(self, slab: int, pages: int, op: int = lib.ISW_SIM_WRITE) -> None:
        """A request for the first pages of a slab; what follows takes steps."""
        data = bytes(range(256)) * (pages * PAGE_BYTES // 256) if op == lib.ISW_SIM_WRITE else None
        self.engine.submit(op, slab * SLAB_PAGES * PAGE_BYTES, pages * PAGE_BYTES, data)

    def page_out(self, slab: int, pages: int = SLAB_PAGES) -> None:
        """Writes the first pages of a slab."""
        self.submit(slab, pages)
        self.step()

    def discard(self, slab: int) -> None:
        """The kernel needs none of the slab's pages any longer."""
        self.submit(slab, SLAB_PAGES, lib.ISW_SIM_TRIM)
        self.step()

    async def heat(self, *slabs: int) -> None:
        """Pages to slabs until each of them has a donor and its pages there."""
        await self.until(lambda: self._write(slabs))

    def _write(self, slabs: tuple[int, ...]) -> bool:
        for slab in slabs:
            self.page_out(slab)
        found = [self.engine.slab(slab) for slab in slabs]
        return all(info.remote_valid_pages == SLAB_PAGES for info in found)

    async def until(self, condition: Callable[[], bool], wait_s: float = 60.0) -> float:
        """Returns when something holds, with the seconds that it took."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while not condition():
            assert loop.time() < begun_s + wait_s, "not in time"
            await asyncio.sleep(_STEP_S)
        return loop.time() - begun_s

    def mapped(self) -> list[int]:
        """Slabs that have a donor."""
        slabs = self.engine.slabs()
        return [number for number, info in enumerate(slabs) if info.state is SlabState.MAPPED]

    def done(self) -> Counter[str]:
        """What has been done with slabs, at all donors together."""
        return Counter(what for link in self.links for what, _slab in link.done)

    def check(self) -> None:
        """Engine, links and counts tell of the same slabs. At rest only."""
        at_links = sorted(
            (slab, link.remote, place.slot, place.generation)
            for link in self.links
            for slab, place in link.mapped.items()
        )
        at_engine = []
        for number, info in enumerate(self.engine.slabs()):
            for remote, slot, generation in (
                (info.remote, info.slot, info.generation),
                (info.source_remote, info.source_slot, info.source_generation),
            ):
                if remote is not None:
                    at_engine.append((number, remote, slot, generation))
        assert at_links == sorted(at_engine)
        counts, done = self.mapper.counts, self.done()
        assert counts.mapped == done["map"]
        # Of a slab that is moved without an eviction that waits, only the mapper knows more.
        assert done["whole"] <= counts.moved <= done["take"] - done["cut"]
        # A slab that its donor takes while it is being given back is counted as one of both.
        assert counts.evicted == done["evicted"]
        assert counts.returned == done["empty"]
        assert counts.remapped == self.remapped
        assert not self.mapper.known_donors.searches
        assert not self.mapper.events.drains


@contextlib.asynccontextmanager
async def device(
    *rooms: int, agrees: bool = True, **shape: Any
) -> AsyncIterator[tuple[SlabWorld, list[ObedientLink]]]:
    """A device of that shape (see SlabWorld), alive, with its donors."""
    w = SlabWorld(**shape)
    async with w.live(*rooms, agrees=agrees) as links:
        yield w, links
