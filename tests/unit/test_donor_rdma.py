# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.rdma: connections for a lease, keys for its slabs, refusals with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rdma_end import END

from infiniswap.control import messages as m
from infiniswap.donor.leases import LeaseTable, Owner
from infiniswap.donor.rdma import DonorRdma
from infiniswap.engine.protocol import StoreConfig
from infiniswap.errors import RequestRefusedError
from infiniswap.testing.store import FakeStore
from infiniswap.units import MIB

SESSION = cast(Any, SimpleNamespace(number=4))


async def _off_loop(call: Callable[[], Any]) -> Any:
    return call()


class Donor:
    def __init__(self, *, enabled: bool = True) -> None:
        self.store = FakeStore(StoreConfig(slab_bytes=MIB, slabs_max=4))
        self.store.has_rdma = True
        self.table = LeaseTable(10.0, 4)
        self.table.session_opened(4)
        self.counters: Counter[str] = Counter()
        self.rdma = DonorRdma(self.store, self.table, _off_loop, self.counters, enabled)
        self.lease = self.store.lease_create(4).lease
        owner = Owner("", "swap0", "consumer", "127.0.0.1")
        self.table.grant(self.lease, owner, 4, 4, "", 1, 0.0)

    def map(self) -> m.SlotInfo:
        self.store.preallocate()
        made = self.store.map(self.lease)
        assert made is not None
        info = m.SlotInfo(made.slot, made.generation, 0)
        self.table.mapped(self.lease, info)
        return info

    async def open(self, ends: int = 2) -> m.RdmaAnswer:
        request = m.RdmaRequest(id=1, lease=self.lease, ends=[END] * ends)
        return await self.rdma.open(SESSION, request)


async def test_what_is_mapped_before_and_after_has_a_key() -> None:
    donor = Donor()
    before = donor.map()
    assert (await donor.rdma.map_answer(1, donor.lease, before)).key is None
    answer = await donor.open()
    assert len(answer.ends) == 2
    assert [(slot.slot, slot.generation) for slot in answer.slots] == [(0, before.generation)]
    after = await donor.rdma.map_answer(2, donor.lease, donor.map())
    assert after.key is not None
    assert after.key != answer.slots[0].key
    # A renewed lease has none of that.
    donor.store.lease_renew(donor.lease, 0)
    assert (await donor.rdma.map_answer(3, donor.lease, before)).key is None


async def test_a_slab_that_cannot_be_registered_is_not_lent() -> None:
    donor = Donor()
    first = donor.map()
    await donor.open()
    donor.store.refuse_registration = True
    second = donor.map()
    with pytest.raises(RequestRefusedError, match="locked") as caught:
        await donor.rdma.map_answer(2, donor.lease, second)
    assert caught.value.reason == m.REFUSED_NO_MEMORY
    lease = donor.table.get(donor.lease)
    assert lease is not None
    assert list(lease.slots.values()) == [first]
    assert donor.store.stats()["slabs_mapped"] == 1
    assert donor.counters["rdma_unregistered"] == 1
    # When it is taken away meanwhile, that is no error of another kind.
    donor.store.unmap(donor.lease, first.slot, first.generation, 0)
    with pytest.raises(RequestRefusedError):
        await donor.rdma.map_answer(3, donor.lease, first)
    # Nor does it keep others from being opened; what is missing is left out.
    donor.table.mapped(donor.lease, donor.map())
    assert (await donor.open()).slots == []


async def test_each_refusal_has_its_reason() -> None:
    off = Donor(enabled=False)
    with pytest.raises(RequestRefusedError, match="switched off") as caught:
        await off.open()
    assert caught.value.reason == m.REFUSED_NO_RDMA
    assert (await off.rdma.map_answer(1, off.lease, off.map())).key is None
    without = Donor()
    without.store.has_rdma = False
    with pytest.raises(RequestRefusedError, match="no RDMA device") as caught:
        await without.open()
    assert caught.value.reason == m.REFUSED_NO_RDMA
    assert without.counters["rdma_refused"] == 1
    foreign = m.RdmaRequest(id=1, lease=without.lease + 1, ends=[END])
    with pytest.raises(RequestRefusedError) as caught:
        await without.rdma.open(SESSION, foreign)
    assert caught.value.reason == m.REFUSED_UNKNOWN_LEASE


async def test_without_ends_it_is_ended() -> None:
    donor = Donor()
    info = donor.map()
    await donor.open()
    assert (await donor.open(0)).ends == []
    assert (await donor.rdma.map_answer(1, donor.lease, info)).key is None
