# SPDX-License-Identifier: Apache-2.0
"""Carries out the requests of consumers: a method for each type of request.

To add one, declare its struct in infiniswap.control.messages, and write a method here and a line in
AT_ONCE or IN_TURN.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from msgspec import Struct

from infiniswap.config import DaemonConfig
from infiniswap.control import messages as m
from infiniswap.control.service import ServerSession
from infiniswap.donor.ahead import MappedAhead
from infiniswap.donor.expiry import LeaseExpiry
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.lease_work import FENCE_MS, LeaseWork
from infiniswap.donor.leases import GrantedLease, LeaseRecord, LeaseTable
from infiniswap.donor.rdma import DonorRdma
from infiniswap.donor.room import Room
from infiniswap.donor.written_leases import WrittenLeases
from infiniswap.engine.store import MappedSlot, Store
from infiniswap.errors import EngineError, InfiniswapError, RequestRefusedError
from infiniswap.units import PAGE_BYTES

log = logging.getLogger(__name__)

TICKET_MS: Final = 10_000
"""How long a ticket waits for its connection."""

LASTING_TICKET: Final = m.TICKET_NUMBERS
"""Number of the ticket that lasts as long as the session; no data connection of a device has it."""

_NOT_YET = {errno.ETIMEDOUT, errno.EBUSY, errno.EIO}
"""Errors of a renewal whose old connections have not ended yet."""

_Handler = Callable[..., Coroutine[Any, Any, Struct]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Carries requests out.

    Attributes:
        clock: seconds, monotonic.
        counters: maps_refused, and requests_TYPE for each type.
    """

    config: DaemonConfig
    store: Store
    table: LeaseTable
    work: LeaseWork
    harvester: Harvester
    room: Room
    ahead: MappedAhead
    rdma: DonorRdma
    written: WrittenLeases
    expiry: LeaseExpiry
    clock: Callable[[], float]
    counters: Counter[str]

    async def handle(self, session: ServerSession, request: Any) -> Struct:
        """Carries one request out and returns its answer.

        Raises:
            InfiniswapError: it was refused, or failed.
        """
        kind = type(request)
        self.counters[f"requests_{kind.__struct_config__.tag}"] += 1
        if kind in self.AT_ONCE:
            return await self.AT_ONCE[kind](self, session, request)
        if kind in self.IN_TURN:
            answer = self.IN_TURN[kind](self, session, request)
            return await self.work.whole(answer, request.lease)
        raise RequestRefusedError("not a request of a consumer", reason=m.REFUSED_ERROR)

    async def _memory(self, session: ServerSession, request: m.MemoryRequest) -> m.MemoryAnswer:
        await self.harvester.refresh()
        tenant = session.consumer, request.tenant
        can_map = self.room.slabs(tenant)
        return m.MemoryAnswer(
            id=request.id,
            used_share=self.harvester.used_share(),
            free_slabs=self.harvester.pool.state().free,
            can_map=can_map,
            no_room="" if can_map else self.room.why_none(tenant),
        )

    async def _lease(self, session: ServerSession, request: m.LeaseRequest) -> m.LeaseAnswer:
        if request.slots_max:  # the test page is no loan, and drained donors have networks too
            self.room.check_lending()
        who = session.number, session.consumer
        while (spare := self.table.check_room(*who, request.slots_max)) is not None:
            await self.work.whole(self._end_spare(spare), spare.lease)
        number = self.store.lease_create(request.slots_max)
        record = LeaseRecord(
            lease=number,
            device_id=session.device_id,
            device_name=session.device_name,
            host_name=session.host_name,
            address=session.address,
            slots_max=request.slots_max,
            reclaim=secrets.token_hex(16),
            epoch=self.store.lease_stats(number).epoch,
            certified_host=session.certified_host,
            use=request.use or m.LeaseUse(),
            granted_unix_s=time.time(),
            peer=session.peer,
        )
        lease = self.table.grant(record, session.number, self.clock())

        async def ready() -> list[str]:
            given = self._first_tickets(number, request.tickets)
            if not request.slots_max:  # the next daemon has nothing of it
                return await given
            return (await asyncio.gather(given, self.written.write_down(lease)))[0]

        tickets = await self.work.whole(ready(), number)
        log.info("lease %d granted to %s", number, session)
        return m.LeaseAnswer(
            id=request.id,
            lease=number,
            epoch=record.epoch,
            reclaim=record.reclaim,
            export_bytes=request.slots_max * self.config.slab_bytes or PAGE_BYTES,
            grace_ms=round(self.config.lease_grace_s * 1000),
            tickets=tickets,
        )

    async def _end_spare(self, spare: GrantedLease) -> None:
        """Ends a lease without a slab, so that another one can be granted."""
        if spare.slots or self.table.get(spare.lease) is not spare:
            return  # it has got a slab meanwhile, or is gone
        self.table.expire(spare.lease)
        await self.expiry.end(spare, "had no slab, and another device needs a lease")

    async def _map(self, session: ServerSession, request: m.MapRequest) -> m.MapAnswer:
        return await session.map_once(request.id, lambda: self._map_slab(session, request))

    async def _map_slab(self, session: ServerSession, request: m.MapRequest) -> m.MapAnswer:
        lease = self.table.owned(request.lease, session.number)
        for slot in lease.slots.values():
            # The answer to an earlier map of the same slab was lost: give it again.
            if slot.slab == request.slab:
                return await self.rdma.map_answer(request.id, lease.lease, slot)
        self.room.check_lending()
        self.room.check_held()
        self.room.check_share(lease.tenant)
        if len(lease.slots) >= lease.record.slots_max:
            raise RequestRefusedError(
                f"all {lease.record.slots_max} slots of lease {lease.lease} are in use",
                reason=m.REFUSED_QUOTA,
            )
        if request.ahead:
            self.room.check_ahead()
        made = self._put(lease, request.slab)
        if made is None and not request.ahead:
            await self.room.prepare(lease)
            # The lease may have gone while a slab was made.
            self.table.owned(request.lease, session.number)
            self.room.check_held()
            made = self._put(lease, request.slab)
        if made is None:
            self.counters["maps_refused"] += 1
            why = self.room.why_none() or "has no slab ready yet"
            raise RequestRefusedError(f"the donor {why}", reason=m.REFUSED_NO_MEMORY)
        info = m.SlotInfo(made.slot, made.generation, request.slab)
        self.table.mapped(lease.lease, info)
        if request.ahead:
            self.ahead.mapped(lease.lease, info)
            self.harvester.nudge()  # the next one comes soon
        log.debug("%s: slab %d is in slot %d", session, request.slab, made.slot)
        return await self.rdma.map_answer(request.id, lease.lease, info)

    def _put(self, lease: GrantedLease, slab: int) -> MappedSlot | None:
        try:
            return self.store.map(lease.lease, slab)
        except EngineError as error:
            if error.code != errno.EAGAIN:
                raise
            raise RequestRefusedError(
                "slots that were taken by force wait for the end of old connections",
                reason=m.REFUSED_BUSY,
            ) from error

    async def _keep(self, session: ServerSession, request: m.KeepRequest) -> m.OkAnswer:
        lease = self.table.owned(request.lease, session.number)
        self.ahead.used(lease.lease, request.slot, request.generation)
        return m.OkAnswer(id=request.id)

    async def _unmap(self, session: ServerSession, request: m.UnmapRequest) -> m.OkAnswer:
        lease = self.table.owned(request.lease, session.number)
        slot = lease.slots.get(request.slot)
        if slot is None or slot.generation != request.generation:
            raise RequestRefusedError(
                f"slot {request.slot} of lease {lease.lease} does not hold generation "
                f"{request.generation}",
                reason=m.REFUSED_STALE,
            )
        await self.work.off_loop(
            lambda: self.store.unmap(lease.lease, request.slot, request.generation, FENCE_MS)
        )
        self.table.unmapped(lease.lease, request.slot)
        log.debug("%s: slab %d came back", session, slot.slab)
        return m.OkAnswer(id=request.id)

    async def _renew(self, session: ServerSession, request: m.RenewRequest) -> m.RenewAnswer:
        lease = self.table.reclaim(
            request.lease, session.device_id, request.reclaim, request.epoch, session.number
        )
        try:
            await self.work.off_loop(lambda: self.store.lease_renew(lease.lease, FENCE_MS))
        except EngineError as error:
            if error.code in _NOT_YET:
                raise RequestRefusedError(
                    "connections of the old epoch have not ended yet", reason=m.REFUSED_BUSY
                ) from error
            raise
        epoch = self.store.lease_stats(lease.lease).epoch
        self.table.renewed(lease.lease, epoch, request.use)
        # Before the device hears of the epoch: it must never know a later one than the record.
        await self.written.write_down(lease)
        log.info("lease %d reclaimed by %s (epoch %d)", lease.lease, session, epoch)
        return m.RenewAnswer(id=request.id, epoch=epoch, slots=list(lease.slots.values()))

    async def _tickets(self, session: ServerSession, request: m.TicketsRequest) -> m.TicketsAnswer:
        lease = self.table.owned(request.lease, session.number).lease
        numbers = range(request.first, request.first + request.count)
        if numbers.stop > m.TICKET_NUMBERS:
            raise RequestRefusedError(
                f"data connections have numbers below {m.TICKET_NUMBERS}", reason=m.REFUSED_QUOTA
            )
        for number in numbers:  # all at first, so that they end at the same time
            self.store.ticket_end(lease, number)
        return m.TicketsAnswer(id=request.id, tickets=await self._give_tickets(lease, numbers))

    async def _lasting_ticket(
        self, session: ServerSession, request: m.LastingTicketRequest
    ) -> m.TicketsAnswer:
        lease = self.table.owned(request.lease, session.number).lease
        tickets = await self._give_tickets(lease, [LASTING_TICKET], request.connections, 0)
        if self.table.is_left(lease):  # the session ended meanwhile, and the ticket with it
            self.store.ticket_end(lease, LASTING_TICKET)
        return m.TicketsAnswer(id=request.id, tickets=tickets)

    async def _first_tickets(self, lease: int, count: int) -> list[str]:
        """None if they cannot be given now: the device asks for them again."""
        try:
            return await self._give_tickets(lease, range(count))
        except InfiniswapError as error:
            log.info("lease %d comes without tickets: %s", lease, error)
            return []

    async def _give_tickets(
        self, lease: int, numbers: Sequence[int], uses: int = 1, good_ms: int = TICKET_MS
    ) -> list[str]:
        def give() -> list[str]:
            return [
                self.store.ticket(lease, number, uses=uses, good_ms=good_ms, wait_ms_max=FENCE_MS)
                for number in numbers
            ]

        try:
            return await self.work.off_loop(give) if numbers else []
        except EngineError as error:
            if error.code in _NOT_YET:
                raise RequestRefusedError(
                    "a connection of an earlier ticket has not ended yet, or the lease is being "
                    "renewed",
                    reason=m.REFUSED_BUSY,
                ) from error
            raise

    async def _connect_rdma(self, session: ServerSession, request: m.RdmaRequest) -> m.RdmaAnswer:
        return await self.rdma.open(session, request)

    async def _release(self, session: ServerSession, request: m.ReleaseRequest) -> m.OkAnswer:
        lease = self.table.owned(request.lease, session.number)
        self.table.expire(lease.lease)
        await self.expiry.end(lease, "released")
        return m.OkAnswer(id=request.id)

    AT_ONCE: ClassVar[Mapping[type[Struct], _Handler]] = {
        m.MemoryRequest: _memory,
        m.LeaseRequest: _lease,
        m.KeepRequest: _keep,
    }
    """Requests that wait for no other."""
    IN_TURN: ClassVar[Mapping[type[Struct], _Handler]] = {
        m.MapRequest: _map,
        m.UnmapRequest: _unmap,
        m.RenewRequest: _renew,
        m.TicketsRequest: _tickets,
        m.LastingTicketRequest: _lasting_ticket,
        m.RdmaRequest: _connect_rdma,
        m.ReleaseRequest: _release,
    }
    """Requests that wait for earlier ones of their lease."""
