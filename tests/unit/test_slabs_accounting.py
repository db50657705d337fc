# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a device's slabs: engine, donors, counts and alarms tell the same of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.devices.slab_world import SlabWorld
from support.machine.virtual_time import in_virtual_time

from infiniswap.engine.protocol import EngineEvent, EventKind
from infiniswap.units import HostPort

pytestmark = pytest.mark.requires_native

SLABS = 4
DONORS = 3
EVENT_FIELDS = ("code", "remote", "slab", "generation", "value")
ACTIONS = st.sampled_from(
    (
        *("page out", "discard", "rest", "evict", "evict at once", "refuse", "die", "fill up"),
        *("free", "stick", "stick", "distrust", "distrust", "refuse", "evict", "forget", "list"),
        *("backup fails", "backup works"),
    )
)
STEPS = st.lists(
    st.tuples(ACTIONS, st.integers(0, SLABS - 1), st.integers(0, DONORS - 1)), max_size=24
)


class Model:
    """What must have come of it, counted beside the mapper."""

    def __init__(self, world: SlabWorld) -> None:
        self.world = world
        self.links = world.donors(*[SLABS] * DONORS)
        self.listed = {link.address for link in self.links}
        self.is_backup_failing = False
        self.distrusted: dict[HostPort, int] = {}
        """Donors, and how much each had done by then."""
        self.evicting: set[asyncio.Task[bool]] = set()

    async def step(self, action: str, slab: int, donor: int) -> None:
        w, link = self.world, self.links[donor]
        holder = w.mapper.known_donors.of(slab) or link
        if action in ("evict", "evict at once", "refuse", "distrust"):
            link = cast(Any, holder)
        if action == "page out":
            for _ in range(5):
                w.page_out(slab)
                await asyncio.sleep(0.1)
        elif action == "rest":
            await asyncio.sleep(12.0)
        elif action == "discard":
            w.discard(slab)
            await asyncio.sleep(20.0)
        elif action.startswith("evict") and slab in link.mapped:
            evicting = link.evict(slab, 0.0 if action == "evict at once" else 3.0)
            self.evicting.add(asyncio.create_task(evicting))
            await asyncio.sleep(0.02 * slab)
        elif action == "die":
            await self.settle()
            await link.die()
        elif action == "refuse" and slab in link.mapped:
            place, remote = link.mapped[slab], link.remote
            self.report("SLAB_ERROR", slab=slab, remote=remote, generation=place.generation)
        elif action in ("fill up", "free"):
            link.room, link.is_reachable = (0 if action == "fill up" else SLABS), True
        elif action == "stick":  # for longer than a move may take, not as long as a drain
            link.is_stuck = True
            asyncio.get_running_loop().call_later(5.0, setattr, link, "is_stuck", False)
        elif action == "distrust" and cast(Any, link) in w.mapper.known_donors.links:
            self.distrusted[link.address] = len(link.done)
            w.mapper.distrusted(cast(Any, link), "it lies")
            await asyncio.sleep(11.0)
        elif action in ("forget", "list"):
            self.listed ^= {link.address} & self.listed
            self.listed |= {link.address} if action == "list" else set()
            made = {link.address: cast(Any, link) for link in self.links}
            w.mapper.known_donors.know(sorted(self.listed), made.__getitem__)
            known = {link.address for link in w.mapper.known_donors.links}
            self.distrusted = {a: done for a, done in self.distrusted.items() if a in known}
        elif action.startswith("backup"):
            self.is_backup_failing = action == "backup fails"
            self.report("BACKUP_FAILING" if self.is_backup_failing else "BACKUP_RECOVERED")

    def report(self, kind: str, **fields: int | None) -> None:
        values = {name: fields.get(name) or 0 for name in EVENT_FIELDS}
        self.world.mapper.events._take(EngineEvent(EventKind[kind], **values))

    async def settle(self) -> None:
        """No slab is on its way."""
        if self.evicting:
            await asyncio.wait(self.evicting)
        if self.is_moving() and not self.world.has_backup:
            # Each eviction took room away: without any, a slab's only copy stays where it is.
            for link in self.links:
                link.room = max(link.room, SLABS)
        await self.world.until(lambda: not self.is_moving())
        await asyncio.sleep(6.0)
        await self.world.until(lambda: not self.world.mapper.known_donors.searches)

    def is_moving(self) -> bool:
        return any(slab.is_migrating for slab in self.world.engine.slabs())

    def alarms(self) -> set[str]:
        """Those that must stand."""
        names = {
            f"donor {link.address}"
            for link in self.links
            if link.address in self.distrusted
            and not taken(link.done[self.distrusted[link.address] :])
        }
        if self.is_backup_failing:
            names.add("backup")
        if not self.world.has_backup and len(self.world.mapped()) < SLABS:
            names.add("no-donor")
        return names


def taken(done: list[tuple[str, int]]) -> bool:
    return any(what in ("map", "take") for what, _slab in done)


@pytest.mark.parametrize("has_backup", [True, False])
@settings(max_examples=60)
@example([("discard", 2, 0), ("rest", 0, 0), ("evict at once", 2, 0)], 0)
@given(STEPS, st.integers(0, 99))
def test_engine_donors_counts_and_alarms_agree(
    has_backup: bool, steps: list[tuple[str, int, int]], seed: int
) -> None:
    @in_virtual_time
    async def live() -> None:
        w = SlabWorld(SLABS, has_backup=has_backup, seed=seed, refill_pages_per_s=1000.0)
        model = Model(w)
        async with w.live():
            for slab in range(SLABS):
                await model.step("page out", slab, 0)
            for step in steps:
                await model.step(*step)
            await model.settle()
            assert set(w.mapper.alarms) == model.alarms()
            assert w.mapper.counts.evicted == w.done()["evicted"]

    live()
