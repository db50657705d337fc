# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.rdma: connections for a lease, keys for its slabs, refusals with a reason."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.donors.lease_records import lease_record
from support.donors.rdma_end import END
from support.donors.refusals import refused
from support.machine.at_once import at_once

from infiniswap.control import messages as m
from infiniswap.donor.leases import LeaseTable
from infiniswap.donor.rdma import DonorRdma
from infiniswap.engine.store import StoreConfig
from infiniswap.errors import RequestRefusedError
from infiniswap.rdma_address import RdmaKey
from infiniswap.testing.store import FakeStore
from infiniswap.units import MIB

SESSION = cast(Any, SimpleNamespace(number=4, address="10.0.0.2:5"))


class Donor:
    def __init__(self, *, enabled: bool = True, patience_s: float = 60.0) -> None:
        self.store = FakeStore(StoreConfig(slab_bytes=MIB, slabs_max=4))
        self.store.has_rdma = True
        self.table = LeaseTable(10.0, 4)
        self.table.session_opened(4)
        self.counters: Counter[str] = Counter()
        self.rdma = DonorRdma(self.store, self.table, at_once, self.counters, enabled, patience_s)
        self.lease = self.store.lease_create(4)
        self.table.grant(lease_record(self.lease, slots_max=4), 4, 0.0)

    def map(self) -> m.SlotInfo:
        self.store.preallocate()
        made = self.store.map(self.lease)
        assert made is not None
        info = m.SlotInfo(made.slot, made.generation, 0)
        self.table.mapped(self.lease, info)
        return info

    async def keep_registered(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Until `sleep` is cancelled."""
        with ThreadPoolExecutor(1) as background, pytest.raises(asyncio.CancelledError):
            await self.rdma.keep_ready(background, sleep)

    async def key(self, slot: m.SlotInfo) -> RdmaKey | None:
        """As the answer to a map request has it."""
        return (await self.rdma.map_answer(1, self.lease, slot)).key

    async def open(self, ends: int = 2, address: str = "") -> m.RdmaAnswer:
        request = m.RdmaRequest(id=1, lease=self.lease, ends=[END] * ends)
        session = SimpleNamespace(number=4, address=address) if address else SESSION
        return await self.rdma.open(cast(Any, session), request)


async def test_what_is_mapped_before_and_after_has_a_key() -> None:
    donor = Donor()
    before = donor.map()
    assert await donor.key(before) is None
    answer = await donor.open()
    assert len(answer.ends) == 2
    assert [(slot.slot, slot.generation) for slot in answer.slots] == [(0, before.generation)]
    after = await donor.key(donor.map())
    assert after not in (None, answer.slots[0].key)
    # A renewed lease has none of that.
    donor.store.lease_renew(donor.lease, 0)
    assert await donor.key(before) is None


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("[fe80::2%lo]:5", socket.if_nametoindex("lo")),
        ("[fe80::2%gone]:5", 0),
        ("[fd00::2]:5", 0),
        ("10.0.0.2:5", 0),
    ],
)
async def test_a_link_local_consumer_is_reached_by_its_interface(address: str, scope: int) -> None:
    donor = Donor()
    donor.store.rdma_scope = -1
    await donor.open(address=address)
    assert donor.store.rdma_scope == scope


async def test_a_consumer_that_comes_back_waits_for_no_registration() -> None:
    """Dozens of slabs take longer than it has: it is told so, and asks again."""
    donor = Donor(patience_s=0.0)
    slabs = [donor.map() for _ in range(3)]
    with refused(m.REFUSED_NO_RDMA, "3 of 3 slabs are still being"):
        await donor.open()
    # Over TCP until then: a slab is mapped without a key.
    assert await donor.key(slabs[0]) is None

    async def once(_pause_s: float) -> None:
        raise asyncio.CancelledError

    await donor.keep_registered(once)
    assert donor.counters["rdma_registered_ahead"] == 3
    assert [slot.slot for slot in (await donor.open()).slots] == [slab.slot for slab in slabs]


async def test_a_host_without_rdma_is_asked_now_and_then() -> None:
    donor = Donor()
    donor.map()
    donor.store.has_rdma = False
    looks = 0

    async def sleep(_pause_s: float) -> None:
        nonlocal looks
        looks += 1
        donor.store.has_rdma = looks > 1
        if donor.store.rdma_registered:
            raise asyncio.CancelledError
        assert looks < 100

    await donor.keep_registered(sleep)
    assert looks > 10


async def test_a_host_without_rdma_is_asked_for_nothing_to_let_go_of() -> None:
    donor = Donor()
    donor.store.has_rdma = False
    asked: list[str] = []

    async def asks(call: Callable[[], Any]) -> Any:
        asked.append(getattr(call, "__name__", "?"))
        return call()

    donor.rdma = DonorRdma(donor.store, donor.table, cast(Any, asks), donor.counters, True)
    looks = 0

    async def sleep(_pause_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 60:
            raise asyncio.CancelledError

    await donor.keep_registered(sleep)
    assert asked == []


async def test_a_device_that_is_to_be_removed_is_let_go_of() -> None:
    """At once, also while a refusal is waited out, and when RDMA is switched off."""
    donor = Donor()
    info = donor.map()
    await donor.open()
    donor.map()
    seen: list[set[int]] = []

    async def sleep(_pause_s: float) -> None:
        seen.append(donor.store.rdma_registered)
        if len(seen) == 3:
            raise asyncio.CancelledError
        donor.store.has_rdma = donor.store.rdma_is_leaving = True

    donor.store.rdma_is_leaving = True
    await donor.keep_registered(sleep)
    assert seen == [set()] * 3
    assert not donor.store.rdma_is_leaving
    assert await donor.key(info) is None


async def test_a_slab_that_cannot_be_registered_is_not_lent() -> None:
    donor = Donor()
    first = donor.map()
    await donor.open()
    donor.store.refuse_registration = True
    second = donor.map()
    with refused(m.REFUSED_NO_MEMORY, "locked"):
        await donor.rdma.map_answer(2, donor.lease, second)
    lease = donor.table.get(donor.lease)
    assert lease is not None
    assert list(lease.slots.values()) == [first]
    assert donor.store.stats()["slabs_mapped"] == 1
    assert donor.counters["rdma_unregistered"] == 1
    # When it is taken away meanwhile, that is no error of another kind.
    donor.store.unmap(donor.lease, first.slot, first.generation, 0)
    with pytest.raises(RequestRefusedError):
        await donor.rdma.map_answer(3, donor.lease, first)
    # Nor does it keep others from being opened; what is missing is left out, and told once.
    donor.table.mapped(donor.lease, donor.map())
    counted = donor.counters["rdma_unregistered"]
    assert (await donor.open()).slots == []
    (missing,) = lease.slots.values()
    assert donor.counters["rdma_unregistered"] == counted + 1
    donor.store.unmap(donor.lease, missing.slot, missing.generation, 0)
    assert (await donor.open()).slots == []
    assert donor.counters["rdma_unregistered"] == counted + 2


async def test_each_refusal_has_its_reason() -> None:
    off = Donor(enabled=False)
    with refused(m.REFUSED_NO_RDMA, "switched off"):
        await off.open()
    assert await off.key(off.map()) is None
    without = Donor()
    without.store.has_rdma = False
    with refused(m.REFUSED_NO_RDMA, "no RDMA device"):
        await without.open()
    assert without.counters["rdma_refused"] == 1
    foreign = m.RdmaRequest(id=1, lease=without.lease + 1, ends=[END])
    with refused(m.REFUSED_UNKNOWN_LEASE):
        await without.rdma.open(SESSION, foreign)


async def test_without_ends_it_is_ended() -> None:
    donor = Donor()
    info = donor.map()
    await donor.open()
    assert (await donor.open(0)).ends == []
    assert await donor.key(info) is None
    # Perhaps a consumer's look whether RDMA works: nothing is registered anew for the next.
    assert donor.store.rdma_registered == {info.generation}
    donor.rdma.enabled = False
    assert (await donor.open(0)).ends == []


async def test_switched_off_and_on_again() -> None:
    """Off, nothing holds the device; on, all is registered again."""
    donor = Donor()
    info = donor.map()
    await donor.open()
    seen: list[tuple[set[int], RdmaKey | None]] = []

    async def sleep(_pause_s: float) -> None:
        seen.append((donor.store.rdma_registered, await donor.key(info)))
        donor.rdma.enabled = len(seen) > 2
        if len(seen) == 5:
            raise asyncio.CancelledError

    await donor.keep_registered(sleep)
    on, off = {info.generation}, set[int]()
    assert [registered for registered, _key in seen] == [on, off, off, on, on]
    # The connections have ended, too; new ones are the consumer's to ask for.
    assert [key is not None for _registered, key in seen] == [True] + [False] * 4


async def test_switched_off_while_a_consumer_connects() -> None:
    donor = Donor()

    async def off_loop(call: Callable[[], Any]) -> Any:
        donor.rdma.enabled = False
        return call()

    donor.rdma._off_loop = off_loop
    info = donor.map()
    with refused(m.REFUSED_NO_RDMA, "switched off"):
        await donor.open()
    donor.rdma.enabled = True
    assert await donor.key(info) is None
