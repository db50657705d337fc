# SPDX-License-Identifier: Apache-2.0
"""What a donor does with the requests of its consumers.

Requests of one lease run one after the other, in the order they came (a lock per lease): a map that
follows an unmap sees its result. What blocks runs in the executor; what was begun there is finished
even when the session that asked for it is gone, because store and lease table must agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from msgspec import Struct

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.channel import LOST, Ended
from infiniswap.control.figures import Figures
from infiniswap.control.service import ServerSession
from infiniswap.control.text import clean_text
from infiniswap.donor import metrics
from infiniswap.donor.ahead import Ahead
from infiniswap.donor.drain import Drain, drain_path
from infiniswap.donor.evict import EvictionConfig, Evictor, MappedSlab
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.keeping import Keeping
from infiniswap.donor.leases import ALONE_S, Lease, LeaseState, LeaseTable, Owner, consumer_leases
from infiniswap.donor.quota import Quota
from infiniswap.donor.rdma import DonorRdma
from infiniswap.donor.records import LeaseRecords
from infiniswap.donor.report import DonorIdentity, ServiceState, Snapshot, fitting
from infiniswap.donor.room import no_room
from infiniswap.engine.protocol import MappedSlot, Store
from infiniswap.errors import (
    EngineError,
    InfiniswapError,
    NotFoundError,
    RequestRefusedError,
    SessionLostError,
)

log = logging.getLogger(__name__)

_NOT_YET = {errno.ETIMEDOUT, errno.EBUSY, errno.EIO}
"""Of a renewal: connections, or what RDMA has of them, have not ended."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Limits of a donor's service.

    Attributes:
        slab_bytes: size of a slab.
        pool_bytes: most memory ever lent.
        grace_s, leases_max, alone_s: see LeaseTable.
        connections_per_host_max: see infiniswap.donor.leases.consumer_leases.
        heartbeat_s: told to consumers.
        silence_s: told to consumers.
        authenticated: whether a cluster secret is in force.
        fence_ms: how long a renewal or unmap waits for requests under way.
        eviction: bounds of a batch eviction.
        consumer_share_max: of the pool, what one consumer may keep while others need memory.
        state_dir: for what outlives the daemon; None: nothing does.
        listen_port: of the control API as configured; 0: another after each start.
        rdma: whether RDMA is offered.
        prepare_s: how long a map request waits for a slab to be allocated. Shorter than the
            consumer waits for its answer, so that it gets one.
    """

    slab_bytes: int
    pool_bytes: int
    grace_s: float = 10.0
    leases_max: int = 256
    connections_per_host_max: int = 128
    alone_s: float = ALONE_S
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    authenticated: bool = False
    fence_ms: int = 5_000
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    drain_move_s: float = 60.0
    consumer_share_max: float = 0.5
    state_dir: Path | None = None
    listen_port: int = 0
    rdma: bool = True
    prepare_s: float = 1.5


def _kept(session: ServerSession, slab: int, error: Exception) -> None:
    about = events.about(events.SLAB_KEPT)
    log.warning("%s keeps slab %d: %s", session, slab, error, extra=about)


def _not_given_up(session: ServerSession, slab: int, error: Exception) -> None:
    about = events.about(events.SLAB_FORCED)
    log.warning("%s did not give slab %d up: %s", session, slab, error, extra=about)


class DonorService:
    """The donor behind the control API (infiniswap.control.service.Service).

    Args:
        identity: who this is.
        config: limits.
        store: slab pool and data port.
        harvester: memory.
        executor: for blocking calls.
        clock: seconds, monotonic.
        rng: chooses which slabs may be evicted; None: a source of its own.
        records: where leases are written down for a successor; None: they end with this one.
    """

    def __init__(
        self,
        identity: DonorIdentity,
        config: ServiceConfig,
        store: Store,
        harvester: Harvester,
        executor: Executor,
        clock: Callable[[], float],
        rng: Random | None = None,
        records: LeaseRecords | None = None,
    ) -> None:
        self._identity = identity
        self.config = config
        self._store = store
        self._harvester = harvester
        self._executor = executor
        self._clock = clock
        self._started_s = clock()
        self._started_unix_s = time.time()
        self._table = LeaseTable(
            config.grace_s,
            config.leases_max,
            consumer_leases(config.leases_max, config.connections_per_host_max),
            config.alone_s,
        )
        self._locks: dict[int, asyncio.Lock] = {}
        self._sessions: dict[int, ServerSession] = {}
        self._under_way: set[asyncio.Future[Any]] = set()
        self.control_port = 0
        self.data_port = 0
        self.degraded: list[str] = []
        self.counters: Counter[str] = Counter()
        self.server_counters: Counter[str] = Counter()
        self.evictor = Evictor(self, config.eviction, rng or Random(), clock, self.counters)
        slabs_max = config.pool_bytes // config.slab_bytes
        path = drain_path(config.state_dir, identity.donor_id, config.listen_port)
        self.drain = Drain(
            self.evictor,
            lambda: len(self.mapped()),
            self._tell_draining,
            path,
            config.drain_move_s,
        )
        self.keeping = Keeping(self._table, records, self._off_loop, self.counters)
        self.rdma = DonorRdma(store, self._table, self._off_loop, self.counters, config.rdma)
        self.quota = Quota(self._table, self.evictor, slabs_max, config.consumer_share_max)
        self.ahead = Ahead(self._table, self.evictor)

    # --------------------------------------------------------------------- sessions

    def welcome(self, version: int) -> m.Welcome:
        """See Service."""
        return m.Welcome(
            version=version,
            donor_id=self._identity.donor_id,
            donor_name=self._identity.name,
            incarnation=self._identity.incarnation,
            slab_bytes=self.config.slab_bytes,
            data_port=self.data_port,
            grace_ms=round(self.config.grace_s * 1000),
            heartbeat_ms=round(self.config.heartbeat_s * 1000),
            silence_ms=round(self.config.silence_s * 1000),
            draining=self.drain.is_active,
            rdma=self.rdma.enabled,
            maps_ahead=True,
        )

    def session_opened(self, session: ServerSession) -> None:
        """See Service."""
        self._sessions[session.number] = session
        self._table.session_opened(session.number)
        log.info("%s connected", session)

    def session_closed(self, session: ServerSession, ended: Ended) -> None:
        """See Service."""
        self._sessions.pop(session.number, None)
        leases = self._table.session_closed(session.number, self._clock())
        said_so = ended.reason in (m.GOODBYE_DONE, m.GOODBYE_SHUTDOWN)
        numbers = ", ".join(str(lease.lease) for lease in leases)
        log.log(
            logging.INFO if said_so else logging.WARNING,
            "%s disconnected (%r)%s",
            session,
            ended.reason if ended.reason == LOST or not ended.detail else ended.detail,
            f"; lease {numbers} waits for it" if leases else "",
            extra=events.about(events.CONSUMER_LOST) if leases and not said_so else None,
        )

    async def set_draining(self, draining: bool) -> m.DrainInfo:
        """See Service."""
        warning = await self.drain.set(draining)
        return m.DrainInfo(
            draining=self.drain.is_active,
            slabs_mapped=len(self.mapped()),
            warning=clean_text(warning),
        )

    async def _tell_draining(self, draining: bool) -> None:
        await asyncio.gather(
            *(
                session.channel.notify(m.DrainNotice(draining=draining))
                for session in self._sessions.values()
            )
        )

    async def handle(self, session: ServerSession, request: Any) -> Struct:
        """See Service."""
        self.counters[f"requests_{type(request).__struct_config__.tag}"] += 1
        match request:
            case m.MemoryRequest():
                return await self._memory(session, request)
            case m.LeaseRequest():
                return await self._lease(session, request)
            case m.MapRequest():
                mapping = session.map_once(request.id, lambda: self._map(session, request))
                return await self._whole(mapping, request.lease)
            case m.KeepRequest():
                lease = self._table.owned(request.lease, session.number)
                self.ahead.keep(lease.lease, request.slot, request.generation)
                return m.OkAnswer(id=request.id)
            case m.UnmapRequest():
                return await self._whole(self._unmap(session, request), request.lease)
            case m.RenewRequest():
                return await self._whole(self._renew(session, request), request.lease)
            case m.RdmaRequest():
                return await self._whole(self.rdma.open(session, request), request.lease)
            case m.ReleaseRequest():
                return await self._whole(self._release(session, request), request.lease)
            case _:
                raise RequestRefusedError("not a request of a consumer", reason=m.REFUSED_ERROR)

    async def finish(self) -> None:
        """Waits for what is still being carried out (each bounded by itself)."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    # --------------------------------------------------------------------- requests

    async def _memory(self, session: ServerSession, request: m.MemoryRequest) -> m.MemoryAnswer:
        await self._harvester.refresh()
        can_map = (
            self._harvester.slabs_mappable()
            or len(self.ahead.slabs())
            or self.quota.reclaimable(session.consumer)
        )
        can_map = 0 if self.drain.is_active or self._harvester.is_short else can_map
        return m.MemoryAnswer(
            id=request.id,
            used_share=self._harvester.used_share(),
            free_slabs=self._harvester.pool().free,
            can_map=can_map,
            no_room="" if can_map else self._no_room(),
        )

    async def _lease(self, session: ServerSession, request: m.LeaseRequest) -> m.LeaseAnswer:
        self._refuse_if_draining()
        self._table.check_room(session.number, session.consumer, request.slots_max)
        made = self._store.lease_create(request.slots_max)
        reclaim = secrets.token_hex(16)
        owner = Owner(session.device_id, session.device_name, session.host_name, session.address)
        epoch = self._store.lease_stats(made.lease).epoch
        self._table.grant(
            made.lease, owner, session.number, request.slots_max, reclaim, epoch, self._clock()
        )
        lease = self._table.get(made.lease)
        assert lease is not None
        await self._whole(self.keeping.write_down(lease), made.lease)
        log.info("lease %d granted to %s", made.lease, session)
        return m.LeaseAnswer(
            id=request.id,
            lease=made.lease,
            token=made.token,
            epoch=epoch,
            reclaim=reclaim,
            export_bytes=request.slots_max * self.config.slab_bytes,
            grace_ms=round(self.config.grace_s * 1000),
        )

    async def _map(self, session: ServerSession, request: m.MapRequest) -> m.MapAnswer:
        lease = self._table.owned(request.lease, session.number)
        for slot in lease.slots.values():
            # The answer to an earlier map of the same slab was lost: give it again.
            if slot.slab == request.slab:
                return await self.rdma.map_answer(request.id, lease.lease, slot)
        self._refuse_if_draining()
        if len(lease.slots) >= lease.slots_max:
            raise RequestRefusedError(
                f"all {lease.slots_max} slots of lease {lease.lease} are in use",
                reason=m.REFUSED_QUOTA,
            )
        if request.ahead and (self._harvester.is_short or self.ahead.is_awaited):
            raise RequestRefusedError("others need it now", reason=m.REFUSED_NO_MEMORY)
        made = self._put(lease, request.slab)
        if made is None and not request.ahead:
            await self._prepare(session, lease)
            # The lease may have gone while a slab was made.
            self._table.owned(request.lease, session.number)
            made = self._put(lease, request.slab)
        if made is None:
            self.counters["maps_refused"] += 1
            why = self._no_room() or "has no slab ready yet"
            raise RequestRefusedError(f"the donor {why}", reason=m.REFUSED_NO_MEMORY)
        info = m.SlotInfo(made.slot, made.generation, request.slab)
        self._table.mapped(lease.lease, info)
        if request.ahead:
            self.ahead.mapped(lease.lease, info)
            self._harvester.top_up()  # the next one comes soon
        log.debug("%s: slab %d is in slot %d", session, request.slab, made.slot)
        return await self.rdma.map_answer(request.id, lease.lease, info)

    def _put(self, lease: Lease, slab: int) -> MappedSlot | None:
        try:
            return self._store.map(lease.lease, slab)
        except EngineError as error:
            if error.code != errno.EAGAIN:
                raise
            raise RequestRefusedError(
                "slots that were taken by force wait for the end of old connections",
                reason=m.REFUSED_BUSY,
            ) from error

    async def _prepare(self, session: ServerSession, lease: Lease) -> None:
        async def prepare() -> None:
            if await self._harvester.prepare() or self._harvester.is_short:
                return
            made_room = await self.ahead.make_room(lease.lease)
            if made_room or await self.quota.make_room(session.consumer):
                await self._harvester.prepare()

        task = self._track(asyncio.ensure_future(prepare()))
        with self.ahead.awaited():
            # A slab that comes too late for this request is there for the next.
            await asyncio.wait({task}, timeout=self.config.prepare_s)

    async def _unmap(self, session: ServerSession, request: m.UnmapRequest) -> m.OkAnswer:
        lease = self._table.owned(request.lease, session.number)
        slot = lease.slots.get(request.slot)
        if slot is None or slot.generation != request.generation:
            raise RequestRefusedError(
                f"slot {request.slot} of lease {lease.lease} does not hold generation "
                f"{request.generation}",
                reason=m.REFUSED_STALE,
            )
        await self._off_loop(
            lambda: self._store.unmap(
                lease.lease, request.slot, request.generation, self.config.fence_ms
            )
        )
        self._table.unmapped(lease.lease, request.slot)
        log.debug("%s: slab %d came back", session, slot.slab)
        return m.OkAnswer(id=request.id)

    async def _renew(self, session: ServerSession, request: m.RenewRequest) -> m.RenewAnswer:
        lease = self._table.reclaim(
            request.lease, session.device_id, request.reclaim, request.epoch, session.number
        )
        try:
            token = await self._off_loop(
                lambda: self._store.lease_renew(lease.lease, self.config.fence_ms)
            )
        except EngineError as error:
            if error.code in _NOT_YET:
                raise RequestRefusedError(
                    "connections of the old epoch have not ended yet", reason=m.REFUSED_BUSY
                ) from error
            raise
        epoch = self._store.lease_stats(lease.lease).epoch
        self._table.renewed(lease.lease, epoch)
        # Before the device hears of the epoch: it may know none that is later than what is written.
        await self.keeping.write_down(lease)
        log.info("lease %d reclaimed by %s (epoch %d)", lease.lease, session, epoch)
        return m.RenewAnswer(
            id=request.id, token=token, epoch=epoch, slots=list(lease.slots.values())
        )

    async def _release(self, session: ServerSession, request: m.ReleaseRequest) -> m.OkAnswer:
        lease = self._table.owned(request.lease, session.number)
        self._table.expire(lease.lease)
        await self._destroy(lease, "released")
        return m.OkAnswer(id=request.id)

    async def evict_some(self, count: int, urgent: bool) -> int:
        """For the harvester: takes slabs back; returns how many came."""
        move_s = 0.0 if urgent else self.config.eviction.move_s
        untouched = self.ahead.slabs()
        if untouched:  # which costs nobody anything
            return await self.evictor.evict(min(count, len(untouched)), untouched)
        return await self.evictor.evict(count, move_s=move_s)

    # --------------------------------------------------------- eviction (evict.Slabs)

    def mapped(self) -> list[MappedSlab]:
        """Every slab that is lent."""
        return [
            (lease.lease, slot)
            for lease in self._table.leases()
            if lease.state is not LeaseState.EXPIRED
            for slot in lease.slots
        ]

    async def activity(self, lease: int, wait_s: float) -> dict[int, float]:
        """Page I/O per second by slot, as the owner of the lease says.

        Raises:
            InfiniswapError: it did not say.
        """
        session = self._session_of(lease)
        if session is None:
            raise NotFoundError(f"the device of lease {lease} is not connected")
        return await session.activity(lease, wait_s)

    async def evict(self, lease: int, slot: int, deadline_ms: int, move_ms: int = 0) -> bool:
        """Takes a slab back: asks its owner for DONE, past the deadline fences it without.

        Its owner may copy it elsewhere before, for `move_ms` more.

        Returns:
            False when the owner keeps it: it holds the only copy, or it cannot be asked and there
            is no hurry.

        Raises:
            EngineError: the store could not.
        """
        entry = self._table.get(lease)
        info = entry.slots.get(slot) if entry else None
        if info is None:
            return True
        session = self._session_of(lease)
        wait_ms = 0
        if session is None and move_ms and entry and entry.state is LeaseState.ACTIVE:
            return False  # no hurry: its device pages on, and will be back and asked again
        if session is not None:
            try:
                await session.evict(lease, slot, info.generation, deadline_ms + move_ms, move_ms)
                wait_ms = self.config.fence_ms
            except RequestRefusedError as error:
                if error.reason == m.REFUSED_ONLY_COPY:
                    self.counters["evictions_refused"] += 1
                    _kept(session, info.slab, error)
                    return False
                _not_given_up(session, info.slab, error)
            except InfiniswapError as error:
                back = isinstance(error, SessionLostError) and self._session_of(lease)
                if back and back is not session:  # it can be asked again, and may have renewed
                    return await self.evict(lease, slot, deadline_ms, move_ms)
                if move_ms and isinstance(error, SessionLostError):
                    log.info("%s has gone while it copies slab %d: %s", session, info.slab, error)
                    return False  # likewise; it goes on copying
                _not_given_up(session, info.slab, error)
        await self._whole(self._fence(lease, info, wait_ms), lease)
        return True

    async def _fence(self, lease: int, info: m.SlotInfo, wait_ms: int) -> None:
        entry = self._table.get(lease)
        if entry is None or entry.slots.get(info.slot) != info:
            return  # given back in the meantime
        await self._off_loop(lambda: self._store.unmap(lease, info.slot, info.generation, wait_ms))
        self._table.unmapped(lease, info.slot)
        self.counters["evictions"] += 1
        self.counters["evictions_forced"] += not wait_ms

    def _session_of(self, lease: int) -> ServerSession | None:
        entry = self._table.get(lease)
        return self._sessions.get(entry.session or 0) if entry else None

    # ----------------------------------------------------------------------- expiry

    async def watch(self, period_s: float) -> None:
        """Looks after the leases until cancelled."""
        while True:
            try:
                await self.expire()
            except InfiniswapError as error:
                # One lease that cannot be ended must not keep all others alive.
                self.counters["lease_errors"] += 1
                log.error("looking after the leases: %s", error)
            await asyncio.sleep(period_s)

    async def expire(self) -> None:
        """Ends every lease whose device has been away for too long."""
        counts = []
        for lease in self._table.leases():
            # A lease that is being released is gone from the store before it is from the table.
            with contextlib.suppress(EngineError):
                counts.append((lease.lease, self._store.lease_stats(lease.lease).connections))
        for lease in self._table.observe(counts, self._clock()):
            self.counters["leases_expired"] += 1
            why = "expired: its device did not come back"
            if lease.connections:
                why = f"expired: its device had no session for {self.config.alone_s:g} s"
            await self._whole(self._destroy(lease, why, events.LEASE_EXPIRED), lease.lease)

    async def _destroy(self, lease: Lease, why: str, event: events.Event | None = None) -> None:
        slots = len(lease.slots)
        # First: what is half gone must not come back.
        await self.keeping.strike_out(lease)
        try:
            await self._off_loop(lambda: self._store.lease_destroy(lease.lease))
        finally:
            self._table.remove(lease.lease)
            self._locks.pop(lease.lease, None)
        log.info(
            "lease %d of device %s of %s %s; %d slabs are free again",
            lease.lease,
            lease.owner.device_name,
            lease.owner.host_name,
            why,
            slots,
            extra=None if event is None else events.about(event),
        )

    # ----------------------------------------------------------------------- status

    def status(self) -> m.Status:
        """See Service."""
        return fitting(self._snapshot().status)

    def figures(self) -> Figures:
        """See Service."""
        return metrics.figures(self._snapshot(), self._started_unix_s)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            self._identity,
            self._store,
            self._harvester,
            self._table.leases(),
            ServiceState(
                uptime_s=max(0.0, self._clock() - self._started_s),
                slab_bytes=self.config.slab_bytes,
                pool_bytes=self.config.pool_bytes,
                control_port=self.control_port,
                data_port=self.data_port,
                authenticated=self.config.authenticated,
                draining=self.drain.is_active,
                degraded=self.degraded,
                sessions=len(self._sessions),
            ),
            self.counters,
            self.server_counters,
        )

    # ---------------------------------------------------------------------- helpers

    def _no_room(self) -> str:
        return no_room(self._harvester, draining=self.drain.is_active)

    def _refuse_if_draining(self) -> None:
        if self.drain.is_active:
            raise RequestRefusedError("this donor is being drained", reason=m.REFUSED_DRAINING)

    def _lock(self, lease: int) -> asyncio.Lock:
        return self._locks.setdefault(lease, asyncio.Lock())

    async def _whole(self, work: Coroutine[Any, Any, ResultT], lease: int) -> ResultT:
        """Runs work under the lease's lock, to its end even when the caller is cancelled."""

        async def locked() -> ResultT:
            # No lock for a number that nobody holds: those would pile up.
            if self._table.get(lease) is None:
                return await work
            async with self._lock(lease):
                return await work

        task = self._track(asyncio.ensure_future(locked()))
        return await asyncio.shield(task)

    def _track(self, task: asyncio.Future[ResultT]) -> asyncio.Future[ResultT]:
        def done(_task: asyncio.Future[ResultT]) -> None:
            self._under_way.discard(task)
            if not task.cancelled():
                task.exception()  # seen: whoever asked may be gone

        self._under_way.add(task)
        task.add_done_callback(done)
        return task

    async def _off_loop(self, call: Callable[[], ResultT]) -> ResultT:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, call)
