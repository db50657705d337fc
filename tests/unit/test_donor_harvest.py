# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.harvest: how often a donor at rest, and one that is short, reads its figures."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.machine.at_once import AtOnce
from support.machine.virtual_time import in_virtual_time

from infiniswap.donor.harvest import Harvester
from infiniswap.donor.memory import MemoryFigures
from infiniswap.engine.store import StoreConfig
from infiniswap.policy.headroom import HeadroomConfig, HeadroomPolicy
from infiniswap.system.memory import Cache
from infiniswap.testing.store import FakeStore
from infiniswap.units import GIB, MIB


class CountedMemory:
    """A host with that much memory left."""

    name = "host"

    def __init__(self, available_bytes: int) -> None:
        self.available_bytes = available_bytes
        self.reads = self.caches = 0

    def read(self) -> MemoryFigures:
        self.reads += 1
        return MemoryFigures(64 * GIB, self.available_bytes)

    def cache(self) -> Cache | None:
        self.caches += 1
        return Cache(0, 0)


@pytest.mark.parametrize(("available_bytes", "reads"), [(48 * GIB, 60), (8 * GIB, 120), (0, 1200)])
@in_virtual_time
async def test_figures_and_cache_are_read_in_one_call_as_often_as_memory_is_short(
    available_bytes: int, reads: int
) -> None:
    memory, executor = CountedMemory(available_bytes), AtOnce()
    store = FakeStore(StoreConfig(slab_bytes=MIB, slabs_max=4))
    lease = store.lease_create(4)
    for _ in range(4):  # there is something to give back
        store.preallocate()
        store.map(lease)
    policy = HeadroomPolicy(HeadroomConfig(MIB, headroom_bytes=0, pool_bytes_max=4 * MIB))
    time_s = asyncio.get_running_loop().time
    harvester = Harvester(store, policy, memory, executor, time_s)
    await asyncio.sleep(0.37)
    task = asyncio.create_task(harvester.run(), name="harvest")
    await asyncio.sleep(60.0)
    task.cancel()
    await asyncio.wait({task})
    assert memory.reads == pytest.approx(reads, abs=2)
    assert memory.caches == pytest.approx(60, abs=6)
    assert executor.calls == memory.reads


async def test_slabs_that_are_still_being_pinned_are_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Right after a restart those of the predecessor wait for their turn."""
    store = FakeStore(StoreConfig(MIB, 8, leases_max=1))
    policy = HeadroomPolicy(
        HeadroomConfig(slab_bytes=MIB, pool_bytes_max=8 * MIB, headroom_bytes=0)
    )
    store.unpinned = 3
    with ThreadPoolExecutor(1) as executor:
        pool = Harvester(store, policy, CountedMemory(GIB), executor, lambda: 0.0).pool
        store.pinning.clear()
        pinning = asyncio.create_task(pool.pin_found(executor))
        await asyncio.sleep(0)
        pool.tell_unpinned()
        assert not caplog.records
        store.pinning.set()
        await pinning
        pool.tell_unpinned()
        assert not caplog.records
        store.unpinned = 1  # refused for good
        pool.tell_unpinned()
    assert "not pinned: 1 slab, which" in caplog.text
