# SPDX-License-Identifier: Apache-2.0
"""A donor's RDMA: connections for a lease that asks for them, and a key for each of its slabs."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import Counter

from infiniswap.control import messages as m
from infiniswap.control.service import ServerSession
from infiniswap.donor.leases import LeaseTable
from infiniswap.engine.protocol import OffLoop, Store
from infiniswap.errors import EngineError, RequestRefusedError

log = logging.getLogger(__name__)

_FENCE_MS = 1_000
"""For a slab that nobody has heard of yet."""


class DonorRdma:
    """RDMA connections of leases. Requests of one lease come one after the other.

    Args:
        store: slab pool.
        table: leases.
        off_loop: for what blocks.
        counters: rdma_opened, rdma_refused, rdma_unregistered.
        enabled: whether RDMA is offered at all.
    """

    def __init__(
        self,
        store: Store,
        table: LeaseTable,
        off_loop: OffLoop,
        counters: Counter[str],
        enabled: bool,
    ) -> None:
        self._store = store
        self._table = table
        self._off_loop = off_loop
        self._counters = counters
        self.enabled = enabled

    async def open(self, session: ServerSession, request: m.RdmaRequest) -> m.RdmaAnswer:
        """Connects to the consumer's ends and registers what the lease has; without ends, ends it.

        Raises:
            RequestRefusedError: this donor cannot be reached by RDMA, and why.
        """
        lease = self._table.owned(request.lease, session.number)
        if not self.enabled:
            raise RequestRefusedError("RDMA is switched off here", reason=m.REFUSED_NO_RDMA)
        if not request.ends:
            await self._off_loop(lambda: self._store.rdma_close(lease.lease))
            return m.RdmaAnswer(id=request.id, ends=[], probe=m.RdmaKey(0, 0), slots=[])
        try:
            ends, probe = await self._off_loop(
                lambda: self._store.rdma_open(lease.lease, request.ends)
            )
        except EngineError as error:
            self._counters["rdma_refused"] += 1
            log.info("lease %d: not by RDMA: %s", lease.lease, error.what)
            raise RequestRefusedError(error.what, reason=m.REFUSED_NO_RDMA) from error
        slots = []
        for info in list(lease.slots.values()):
            try:
                key = await self._key(lease.lease, info)
            except RequestRefusedError:
                continue  # counted and logged; the consumer sees which are missing
            if key is not None:
                slots.append(m.SlotKey(info.slot, info.generation, key))
        self._counters["rdma_opened"] += 1
        log.info(
            "lease %d: %d connections by RDMA, %d of %d slabs registered",
            lease.lease,
            len(ends),
            len(slots),
            len(lease.slots),
        )
        return m.RdmaAnswer(id=request.id, ends=list(ends), probe=probe, slots=slots)

    async def map_answer(self, number: int, lease: int, slot: m.SlotInfo) -> m.MapAnswer:
        """The answer to request `number`: the slab is in that slot.

        Raises:
            RequestRefusedError: it cannot be registered, and is in the pool again. Others, that
                could be, stay lent.
        """
        try:
            key = await self._key(lease, slot)
        except RequestRefusedError:
            # An eviction may have taken it meanwhile.
            with contextlib.suppress(EngineError):
                await self._off_loop(
                    lambda: self._store.unmap(lease, slot.slot, slot.generation, _FENCE_MS)
                )
                self._table.unmapped(lease, slot.slot)
            raise
        return m.MapAnswer(id=number, slot=slot.slot, generation=slot.generation, key=key)

    async def _key(self, lease: int, slot: m.SlotInfo) -> m.RdmaKey | None:
        """None: the lease has no RDMA connections."""
        if not self.enabled:
            return None
        try:
            return await self._off_loop(
                lambda: self._store.rdma_key(lease, slot.slot, slot.generation)
            )
        except EngineError as error:
            if error.code == errno.ENOTCONN:
                return None
            self._counters["rdma_unregistered"] += 1
            log.warning("lease %d: %s", lease, error.what)
            raise RequestRefusedError(error.what, reason=m.REFUSED_NO_MEMORY) from error
