# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.service_guard: what it says and does, by the clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest
from support.machine.at_once import AtOnce
from support.machine.virtual_time import in_virtual_time

from infiniswap.donor.evict import Evictor, MappedSlab
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.service_guard import ServiceGuard
from infiniswap.engine.store import StoreConfig
from infiniswap.errors import SystemCallError
from infiniswap.policy.eviction import EvictionConfig
from infiniswap.policy.headroom import HeadroomConfig, HeadroomPolicy
from infiniswap.policy.slo import SloPolicy
from infiniswap.testing.memory import FakeMemory
from infiniswap.testing.store import FakeStore
from infiniswap.units import GIB, MIB

SLABS = 8


class Said:
    """A latency that the test sets; None: it cannot be measured."""

    def __init__(self) -> None:
        self.value: float | None = 0.5
        self.wait_s = 0.0
        self.reads = 0
        self.is_closed = False

    async def read(self) -> float:
        self.reads += 1
        await asyncio.sleep(self.wait_s)
        if self.value is None:
            raise SystemCallError("it says nothing")
        return self.value

    async def close(self) -> None:
        self.is_closed = True


class Owners:
    """Give every slab up at once; the higher its slot, the more active it is."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.lease = store.lease_create(SLABS)
        self.slots: dict[int, int] = {}
        self.taken: list[int] = []

    def map(self) -> None:
        self.store.preallocate()
        made = self.store.map(self.lease)
        assert made is not None
        self.slots[made.slot] = made.generation

    def mapped(self) -> list[MappedSlab]:
        return [(self.lease, slot) for slot in self.slots]

    async def activity(self, lease: int, wait_s: float) -> dict[int, float]:
        return {slot: float(slot) for slot in self.slots}

    async def evict(
        self, lease: int, slot: int, deadline_ms: int, move_ms: int = 0, *, last_copy: bool = False
    ) -> bool:
        assert move_ms == 3000
        self.store.unmap(lease, slot, self.slots.pop(slot), 0)
        self.taken.append(slot)
        return True


class Host:
    """A donor's host with a service of bound 1 and a settle time of 10 s; every slab is lent."""

    def __init__(self) -> None:
        self.store = FakeStore(StoreConfig(slab_bytes=MIB, slabs_max=SLABS))
        self.owners = Owners(self.store)
        for _ in range(SLABS):
            self.owners.map()
        limits = HeadroomConfig(MIB, headroom_bytes=0, pool_bytes_max=SLABS * MIB)
        clock = asyncio.get_running_loop().time
        executor = AtOnce()
        memory = FakeMemory(GIB, store=self.store)
        self.harvester = Harvester(self.store, HeadroomPolicy(limits), memory, executor, clock)
        self.counters: Counter[str] = Counter()
        evictor = Evictor(self.owners, EvictionConfig(), Random(1), clock, self.counters)
        self.said = Said()
        self.guard = ServiceGuard(
            *(SloPolicy(1.0, 10.0), self.said, self.harvester, evictor, clock, self.counters, 3.0)
        )

    def is_held(self) -> bool:
        return self.harvester.is_held

    def is_blind(self) -> bool:
        return self.guard.is_blind


@contextlib.asynccontextmanager
async def guarded() -> AsyncIterator[Host]:
    host = Host()
    task = asyncio.create_task(host.guard.run(), name="guard")
    yield host
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert host.said.is_closed


@in_virtual_time
async def test_the_service_is_measured_ten_times_in_a_settle_time() -> None:
    async with guarded() as host:
        await asyncio.sleep(60.0)
        assert host.said.reads == pytest.approx(60, abs=2)
        assert not host.is_held()
        assert host.guard.ratio == 0.5


@in_virtual_time
async def test_slabs_go_back_until_it_holds_and_the_host_has_them() -> None:
    async with guarded() as host:
        await asyncio.sleep(5.0)
        host.said.value = 30.0
        await asyncio.sleep(2.0)
        assert host.is_held()
        assert "latency is 30 of at most 1" in host.harvester.held_why
        assert not host.owners.taken
        await asyncio.sleep(10.0)
        assert host.owners.taken == [7, 6]
        assert host.store.stats()["slabs_dirty"] == 0
        assert host.store.pool_bytes == 6 * MIB
        host.said.value = 0.5
        await asyncio.sleep(300.0)
        assert host.owners.taken == [7, 6]
        assert host.counters["slo_returned"] == 2
        assert not host.is_held()


@in_virtual_time
async def test_the_last_good_state_counts_for_three_settle_times_then_there_is_an_alarm() -> None:
    async with guarded() as host:
        await asyncio.sleep(5.0)
        host.said.value = None
        await asyncio.sleep(28.0)
        assert not host.is_held()
        assert not host.guard.degraded
        await asyncio.sleep(4.0)
        assert host.is_held()
        assert host.is_blind()
        assert "it says nothing" in host.guard.degraded[0]
        assert host.counters["slo_unmeasured"] == pytest.approx(32, abs=2)
        host.said.value = 0.5
        await asyncio.sleep(2.0)
        assert not host.guard.degraded
        assert not host.is_held()
        assert not host.owners.taken


@in_virtual_time
async def test_a_measurement_that_never_ends_is_given_up() -> None:
    async with guarded() as host:
        await asyncio.sleep(5.0)
        host.said.wait_s = 1e6
        await asyncio.sleep(45.0)
        assert host.is_blind()
        assert "no measurement in time" in host.guard.degraded[0]
        host.said.wait_s = 0.0
        await asyncio.sleep(12.0)
        assert not host.is_blind()


@in_virtual_time
async def test_each_change_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infiniswap.donor.service_guard"):
        async with guarded() as host:
            for value in (0.5, 1.5, 0.5, None, 0.5):
                host.said.value = value
                await asyncio.sleep(60.0)
    told = [getattr(line, "isw_fields", {}).get("INFINISWAP_EVENT") for line in caplog.records]
    assert told == ["service-in-danger", "service-well", None, "service-unmeasured", None]
