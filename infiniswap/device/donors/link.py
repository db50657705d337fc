# SPDX-License-Identifier: Apache-2.0
"""One donor, as a device knows it: session, lease, connections, and how they are recovered.

    idle ──map──▶ mapped ──connections or session lost──▶ suspended ──back in time──▶ mapped
     ▲                │ last slab given back                  │ not back in time, or another
     └────────────────┴───────────────◀───────────────────────┘ incarnation: given up

While suspended the engine reads from staging and backup and clears the bit of whatever is
written, so a reclaimed slab needs no copying: what is still valid there is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.channel import Ended
from infiniswap.control.client import Session, connect
from infiniswap.device.donors.counts import LinkCounts, info_of, is_down
from infiniswap.device.donors.give_back import Kept, give_back
from infiniswap.device.donors.leasing import lease_of
from infiniswap.device.donors.link_types import (
    Lease,
    LeaseGoneError,
    LinkConfig,
    Place,
    Slabs,
    is_gone,
)
from infiniswap.device.donors.rdma_return import RdmaReturn
from infiniswap.device.donors.reach import reach
from infiniswap.device.donors.records import encode_record
from infiniswap.device.donors.transport import Wire
from infiniswap.device.off_loop import run_to_end, while_going_on
from infiniswap.engine.protocol import Engine, RemoteConfig
from infiniswap.errors import (
    DeadlineError,
    EngineError,
    InfiniswapError,
    NoDonorError,
    RequestRefusedError,
    SessionLostError,
)
from infiniswap.policy.donor_faults import DonorFaults
from infiniswap.policy.placement import MemoryUse
from infiniswap.units import HostPort

log = logging.getLogger(__name__)

_RETRY_S_FIRST = 0.05
_RETRY_S_MAX = 0.5
_DRAIN_S_MAX = 30.0
T = TypeVar("T")


class DonorLink:
    """One donor. Everything runs on the event loop; blocking engine calls go to `executor`."""

    def __init__(
        self,
        address: HostPort,
        engine: Engine,
        slabs: Slabs,
        config: LinkConfig,
        executor: Executor,
    ) -> None:
        self.address = address
        self.name = ""
        self.remote: int | None = None
        self.mapped: dict[int, Place] = {}  # by slab
        self._kept = Kept()
        self.detail = ""
        self.is_draining = False
        self.is_listed = True
        """Whether it is still among the donors that are known: otherwise it gets no more slabs."""
        self.counts = LinkCounts()
        self.wire = Wire(config.device.transport, address, engine, self._blocking)
        self.rdma_return = RdmaReturn(self.wire, self._probe_rdma, self._recover)
        self._engine = engine
        self._slabs = slabs
        self.config = config
        self._executor = executor
        self._session: Session | None = None
        self._lease: Lease | None = None
        self._lock = asyncio.Lock()  # session, lease and remote change under it
        self._down_s: float | None = None  # when the connections were lost
        self._recovery: asyncio.Task[None] | None = None
        self._closing = False
        self._arriving: asyncio.Future[None] | None = None  # a map answer is awaited
        self._trust = DonorFaults()

    @property
    def state(self) -> str:
        """For tables: idle, mapped, suspended. Without a session alone pages still flow."""
        if self._recovery is not None and self._down_s is not None:
            return "suspended"
        return "mapped" if self.mapped else "idle"

    @property
    def is_usable(self) -> bool:
        """Whether a slab may be placed here now."""
        # Without a session nobody would tell us that it drains no more: then it is asked.
        draining = self.is_draining and self._has_session()
        return self._recovery is None and not draining and not self._closing

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be missed if there were no such link."""
        return (
            self._lease is None
            and self._session is None
            and self._recovery is None
            and not self.mapped
            and not self._lock.locked()
        )

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await run_to_end(self._executor, call)

    # -------------------------------------------------------------------- sessions

    async def _open(self) -> Session:
        """The open session, or a new one, with the donor of our lease. Under the lock."""
        if self._session is not None and self._session.ended is None:
            return self._session
        if self._session is not None:
            await self._session.close()
            self._session = None
        to, config, slab_bytes = self.address, self.config, self.config.device.slab_bytes
        dial = partial(connect, to, config.identity, config.client, slab_bytes=slab_bytes)
        session = await reach(dial, self, self.address.host, self._lease)
        self._session = session
        self.name = session.welcome.donor_name
        return session

    def _check_usable(self) -> None:
        if not self.is_usable:
            raise NoDonorError("it is being recovered", where=f"donor {self.address}")

    async def ask(self, *, ahead: bool = False) -> MemoryUse:
        """The donor's memory use, now. For a mapping ahead only slabs that are free count, and a
        donor that does not know such mappings has none.

        Raises:
            InfiniswapError: it could not be asked.
        """
        self._check_usable()  # a recovery holds the lock for as long as it takes
        async with self._lock:
            self._check_usable()
            session = await self._open()
        answer = await session.memory()
        can_map = 0 if self.is_draining else answer.can_map
        if ahead:
            can_map = min(can_map, answer.free_slabs) if session.welcome.maps_ahead else 0
        return MemoryUse(answer.used_share, can_map, answer.no_room)

    async def let_go(self) -> None:
        """Ends a session that was opened only to ask."""
        if self._recovery is not None:
            return
        async with self._lock:
            if self._lease is None and self._session is not None and self._recovery is None:
                session, self._session = self._session, None
                await session.close()

    # ---------------------------------------------------------------------- slabs

    async def map(self, slab: int, *, migrates: bool = False, ahead: bool = False) -> None:
        """Puts a slab there and tells the engine; one that migrates stays where it is as well, and
        of one `ahead` of need the donor knows that others come first.

        Raises:
            InfiniswapError: refused, or unreachable. Nothing has changed then.
        """
        self._check_usable()
        async with self._lock:
            self._check_usable()
            session = await self._open()
            if ahead and not session.welcome.maps_ahead:  # another than was asked
                raise NoDonorError("it maps nothing ahead", where=f"donor {self.address}")
            lease = await self._ensure_lease(session)
            remote = await self._ensure_remote(session, lease)
            if slab in self.mapped:
                # Asked for it again the donor would name the same slot again.
                raise NoDonorError(f"it has slab {slab} already", where=f"donor {self.address}")
            put = self._engine.slab_migrate if migrates else self._engine.slab_map
            arriving = self._arriving = asyncio.get_running_loop().create_future()
            try:
                try:
                    answer = await session.map(lease.lease, slab, ahead=ahead)
                    self.wire.mapped(remote, answer)
                    put(slab, remote, answer.slot, answer.generation)
                    self.mapped[slab] = Place(answer.slot, answer.generation)
                finally:  # before anything below that waits for the handlers of evictions
                    self._arriving = None
                    arriving.set_result(None)
            except RequestRefusedError as error:
                if error.reason == m.REFUSED_BUSY:  # it cuts the connections, for others to come
                    self._trust.announce(-1, asyncio.get_running_loop().time(), 0.0)
                raise
            except DeadlineError:
                # The slab may be mapped there without our knowing. A renewal tells, and gives
                # back what is not ours; it needs a new session.
                await session.close()
                raise
            except EngineError:
                # The remote went down meanwhile: the slot is given back with the lease.
                with contextlib.suppress(InfiniswapError):
                    await session.unmap(lease.lease, answer.slot, answer.generation)
                raise
            self._slabs.arrived(slab)

    async def _ensure_lease(self, session: Session) -> Lease:
        if self._lease is None:
            self._lease = await lease_of(session, self.config, self.address)
        return self._lease

    def _remote_config(self, lease: Lease) -> RemoteConfig:
        assert self._session is not None
        return self.config.remote(self._session.data_address, lease)

    async def _ensure_remote(self, session: Session, lease: Lease) -> int:
        if self.remote is None:
            config = self._remote_config(lease)
            remote = await self.wire.connect(
                session, lease, config, set(), self._engine.remote_connect
            )
            self._engine.remote_record_set(remote, encode_record(self.address, lease))
            self.remote = remote
            self.rdma_return.connected()
            self.counts.begin()
            log.info("donor %s: connected (%s, %s)", self.address, self.name, self.wire.transport)
        return self.remote

    async def settled(self) -> None:
        """Returns when no recovery is under way."""
        if self._recovery is not None:
            await asyncio.wait({self._recovery})

    async def unmap(self, slab: int, reason: str) -> None:
        """Takes a slab off the donor: drain, then DONE. Returns when both are done."""
        place = self.mapped.get(slab)
        if place is None:
            return
        await self._drain(slab, place, _DRAIN_S_MAX)
        log.info("slab %d: off donor %s (%s)", slab, self.address, reason)
        await give_back(self._session, self._lease, place)

    async def keep(self, slab: int) -> bool:
        """Tells the donor that a slab mapped ahead is in use. False, InfiniswapError: not yet."""
        place, session, lease = self.mapped.get(slab), self._session, self._lease
        if place is None or session is None or session.ended is not None or lease is None:
            return place is None
        with contextlib.suppress(RequestRefusedError):  # it is there no longer
            await session.keep(lease.lease, place.slot, place.generation)
        return True

    async def _drain(self, slab: int, place: Place, wait_s: float) -> bool:
        """Unmaps the slab in the engine and forgets it. Whoever else asks for the same waits for
        the same drain; returns False to all but one of them.

        Raises:
            TimeoutError: requests are still in flight there.
        """
        remote = self.remote
        assert remote is not None, "a slab that is mapped has a remote"
        try:
            pages = 0
            if not self.config.has_backup:
                pages = self._engine.slab_pages_at(slab, remote, place.generation)[0]
            self._engine.slab_unmap(slab, remote, place.generation)
            if pages and not self._closing:
                self._slabs.pages_lost(pages)
        except EngineError:
            # Draining by another's wish, or drained already: then no event will come.
            if not self._engine.slab(slab).is_at(remote, place.generation):
                return self._forget(slab, place)
        # Its event comes by the loop, so not before this. Asked for any sooner, nobody would end
        # the future of a slab that is drained already.
        drained = self._slabs.drained(slab, remote, place.generation)
        # Not asyncio.timeout: that would cancel the future for all who wait for it.
        done, _ = await asyncio.wait({drained}, timeout=wait_s)
        if not done:
            # It ends all the same, and then the slab is here no more: it may have another donor.
            drained.add_done_callback(partial(self._drained_late, slab, place, self._lease))
            raise TimeoutError(f"slab {slab} has requests in flight")
        return self._forget(slab, place)

    def _drained_late(self, slab: int, place: Place, lease: Lease | None, _drained: object) -> None:
        if self._forget(slab, place):
            self._kept.late(place, self._session, lease, self._lease)

    def _forget(self, slab: int, place: Place) -> bool:
        if self.mapped.get(slab) != place:
            return False
        del self.mapped[slab]
        return True

    # ----------------------------------------------- what the donor asks (SessionHandler)

    async def evict(
        self, lease: int, slot: int, generation: int, deadline_s: float, move_s: float
    ) -> None:
        """The donor takes a slab back; DONE is the return.

        Raises:
            RequestRefusedError: without a backup its pages are nowhere else.
        """
        if self._lease is None or self._lease.lease != lease:
            return
        if not self._slabs_in(slot, generation) and self._arriving is not None:
            # The map answer that names it may be here, and whoever waits for that has not run yet.
            await asyncio.wait({self._arriving}, timeout=deadline_s)
        # Past the deadline the donor takes it by force, which costs the connections: it may.
        self._trust.announce(generation, asyncio.get_running_loop().time(), deadline_s)
        for slab, place in self._slabs_in(slot, generation):
            moved = await self._move(slab, move_s)
            if not moved and not self.config.has_backup:
                self._kept.refuse(place, self.mapped.values())
            if self.mapped.get(slab) != place:
                continue  # asked for again, it has gone meanwhile, or even come back
            try:
                is_first = await self._drain(slab, place, max(deadline_s - move_s, 0.1))
            except TimeoutError:
                self._slabs.evicted(self, slab)  # past the deadline the donor takes it anyway
                raise
            if is_first:
                self._slabs.evicted(self, slab)
                how = "every page was copied first" if moved else "read from the backup"
                log.info("slab %d: evicted by donor %s (%s)", slab, self.address, how)
                await self._kept.given_up(place, self._session, self._lease)
        self._trust.withdraw(generation)

    async def _move(self, slab: int, move_s: float) -> bool:
        """As Slabs.move, but not longer than there is somebody to answer: whoever recovers the
        session waits for us. The slab moves on all the same."""
        session = self._session
        if session is None:
            return await self._slabs.move(self, slab, move_s)
        moved = await while_going_on(self._slabs.move(self, slab, move_s), session.wait_ended())
        if moved is None:
            raise SessionLostError("the session ended", where=f"donor {self.address}")
        return moved

    def _slabs_in(self, slot: int, generation: int) -> list[tuple[int, Place]]:
        return [item for item in self.mapped.items() if item[1] == Place(slot, generation)]

    async def activity(self, lease: int) -> Mapping[int, float]:
        """Page I/O per second by slot."""
        if self._lease is None or self._lease.lease != lease:
            return {}
        return {place.slot: self._slabs.activity(slab) for slab, place in self.mapped.items()}

    def draining(self, draining: bool) -> None:
        """The donor takes no more slabs on."""
        self.is_draining = draining

    def ended(self, ended: Ended) -> None:
        """The session has ended."""
        if ended.is_broken and not self._closing:
            self._session_broken(ended.reason)
        if self._closing or self._lease is None:
            return
        text, about = "donor %s: session ended (%s %s)", events.DONOR_SESSION_LOST
        extra = events.about(about, donor=self.address)
        log.warning(text, self.address, ended.reason, ended.detail, extra=extra)
        self.detail = f"session ended: {ended.reason}"
        if ended.by_peer and ended.reason == m.GOODBYE_SHUTDOWN:
            self._down_s = 0.0  # it will not be back: no time to wait
        self._recover()

    # ------------------------------------------------------------------- recovery

    def adopt(self, remote: int, lease: Lease, mapped: Mapping[int, Place]) -> None:
        """A predecessor's lease and slabs, which the engine has SUSPENDED: reclaimed as after any
        loss of connections, or given up. Before anything else is asked of the link."""
        assert self.remote is None
        assert self._lease is None
        self.remote, self._lease, self.mapped = remote, lease, dict(mapped)
        self._down_s = asyncio.get_running_loop().time()
        self.detail = "taken over from a process that ended"
        self._recover()

    def connections_down(self, code: int) -> None:
        """ISW_EVENT_REMOTE_DOWN: the engine has suspended the slabs there."""
        if self._closing or not self._is_down():
            return  # news of connections that a recovery has replaced since
        if self._down_s is None:
            self._down_s = asyncio.get_running_loop().time()
        self.detail = "connections lost"
        self.counts.connections_lost += 1
        if self._recovery is None:
            self._judge(self._trust.lost(asyncio.get_running_loop().time(), code))
            if not self._trust.is_excused:
                self.wire.lost()
            text = "donor %s: connections lost (code %d); %d slabs suspended"
            text += ", pages come from the backup" if self.config.has_backup else ""
            about = events.about(events.DONOR_SUSPENDED, donor=self.address)
            log.warning(text, self.address, code, len(self.mapped), extra=about)
        self._recover()

    def _has_session(self) -> bool:
        return self._session is not None and self._session.ended is None

    def _is_down(self) -> bool:
        return is_down(self._engine, self.remote)

    def bad_page(self, page: int) -> None:
        """A page's bytes were not those that were written there."""
        why = self._trust.bad_page()
        if self._trust.bad_pages == 1:
            about = events.about(events.DONOR_DISTRUSTED, donor=self.address)
            log.error("donor %s: page %d came with other bytes", self.address, page, extra=about)
        self._judge(why)

    def refused(self) -> None:
        """It refuses requests for a slab that it had taken on."""
        self._judge(self._trust.refused(asyncio.get_running_loop().time()))

    def _session_broken(self, reason: str) -> None:
        self.counts.sessions_broken[reason] += 1
        why = self._trust.session_broken(asyncio.get_running_loop().time())
        if self._lease is not None:
            self._judge(why)
        elif why:
            self._slabs.distrusted(self, why)

    def _judge(self, why: str) -> None:
        # Without a backup it has the only copies: whatever still comes back is better than none.
        if why and self.config.has_backup:
            self._down_s = 0.0
            self._slabs.distrusted(self, why)
            if self.remote is not None:
                self._engine.remote_shutdown(self.remote)

    async def _probe_rdma(self) -> bool:
        """Whether RDMA works now; in time for a recovery or `ask`, which may wait for it."""
        wait_s = min(max(0.1, self.config.suspend_s / 4), 0.5)
        try:
            async with asyncio.timeout(wait_s * 2), self._lock:
                session, lease = self._session, self._lease
                if session is None or session.ended or lease is None or not self.is_usable:
                    return False
                config = self._remote_config(lease)
                places, leave = set(self.mapped.values()), self._engine.remote_destroy
                return await self.wire.probe(session, lease, config, places, leave, wait_s)
        except (InfiniswapError, TimeoutError) as error:
            log.debug("donor %s: RDMA was not tried to the end: %s", self.address, error)
            return False

    def _recover(self) -> None:
        self.rdma_return.interrupt()
        if self._recovery is None:
            self._recovery = asyncio.create_task(
                self._run_recovery(), name=f"recover donor {self.address}"
            )

    async def _run_recovery(self) -> None:
        try:
            async with self._lock:
                if not await self._reclaim():
                    await self._give_up()
        except TimeoutError as error:  # of a drain: perhaps the host was suspended meanwhile
            log.warning("donor %s: not recovered yet: %s", self.address, error)
            await asyncio.sleep(_RETRY_S_MAX)
        except Exception:
            log.exception("donor %s: recovery failed; it is tried again", self.address)
            await asyncio.sleep(_RETRY_S_MAX)
        finally:
            self._recovery = None
            self._down_s = None
            # Both may have been lost again while nobody was listening.
            if not self._closing and self._is_down():
                self._down_s = asyncio.get_running_loop().time()
                self._recover()
            elif not self._closing and self._lease is not None and not self._has_session():
                self._recover()

    async def _reclaim(self) -> bool:
        """Tries to get the same lease back while there is time; True when it has."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        retry_s = _RETRY_S_FIRST
        again_s = started_s + self._trust.session_pause_s(started_s)
        while not self._closing:
            # As long as the data connections work, a missing session costs nothing.
            since_s = self._down_s
            if since_s is not None and loop.time() > max(since_s, 0.0) + self.config.suspend_s:
                self.detail = "did not come back in time"
                return False
            if since_s is None and loop.time() < again_s:
                await asyncio.sleep(_RETRY_S_MAX)
                continue
            try:
                async with asyncio.timeout(max(0.2, self.config.suspend_s)):
                    return await self._reclaim_once()
            except (InfiniswapError, TimeoutError) as error:
                self.detail = str(error) or "no answer"
                if is_gone(error):
                    self.detail = f"lease gone: {error}"
                    return False
            if loop.time() - started_s > 60.0 and self._down_s is None:
                started_s = loop.time()
                log.warning("donor %s: no session, pages still flow: %s", self.address, self.detail)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _RETRY_S_MAX)
        return False

    async def _reclaim_once(self) -> bool:
        lease, remote = self._lease, self.remote
        if lease is None or remote is None:
            raise LeaseGoneError("no lease to reclaim")
        session = await self._open()
        if session.welcome.incarnation != lease.incarnation:
            raise LeaseGoneError("the daemon was started anew")
        if session.ended is not None:  # it would cost connections that may be healthy
            raise NoDonorError("it has ended the session", where=f"donor {self.address}")
        # The old connections must be dead before the donor is asked to fence them; a healthy
        # set is suspended for that moment.
        self._engine.remote_shutdown(remote)
        answer = await session.renew(lease.lease, lease.reclaim, lease.epoch)
        lease = replace(lease, token=answer.token, epoch=answer.epoch, peer=session.peer)
        self._lease = lease
        self._engine.remote_record_set(remote, encode_record(self.address, lease))
        there = {Place(info.slot, info.generation) for info in answer.slots}

        def dial(config: RemoteConfig) -> int:
            self._engine.remote_reconnect(remote, config)
            return remote

        config, ours = self._remote_config(lease), set(self.mapped.values()) & there
        await self.wire.connect(session, lease, config, ours, dial)
        for slab, place in list(self.mapped.items()):
            if place in there:
                self._engine.slab_resume(slab, remote, place.generation)
                self._slabs.arrived(slab)
            else:
                await self._abandon(slab)
        for place in there - set(self.mapped.values()):
            await session.unmap(lease.lease, place.slot, place.generation)
        self.counts.reclaimed += 1
        self._trust.recovered(asyncio.get_running_loop().time())
        self.rdma_return.connected()
        log.info(
            "donor %s: back with the same lease, %d slabs resumed", self.address, len(self.mapped)
        )
        self.detail = ""
        return True

    async def _abandon(self, slab: int) -> None:
        """The slab's copy there is gone; nothing to tell the donor."""
        place = self.mapped.get(slab)
        if place is not None:  # an eviction's drain may have ended meanwhile
            await self._drain(slab, place, _DRAIN_S_MAX)
        self._slabs.lost(slab)

    async def _give_up(self) -> None:
        """Gives the lease up explicitly, so that the donor can never count as its former self."""
        remote, lease, count = self.remote, self._lease, len(self.mapped)
        if remote is not None:
            with contextlib.suppress(InfiniswapError):
                self._engine.remote_shutdown(remote)
        for slab in list(self.mapped):
            await self._abandon(slab)
        if remote is not None:
            self.counts.end(info_of(self._engine, remote))
            await self._blocking(lambda: self._engine.remote_destroy(remote))
        self.counts.given_up += 1
        self.remote, self._lease = None, None
        self._trust.given_up()
        about = events.about(events.DONOR_GIVEN_UP, donor=self.address)
        text = "donor %s: given up (%s), %d slabs unmapped"
        log.warning(text, self.address, self.detail, count, extra=about)
        session, self._session = self._session, None
        if session is not None:
            try:
                if session.ended is None and lease is not None:
                    with contextlib.suppress(InfiniswapError):
                        await session.release(lease.lease)
            finally:
                await session.close()  # nobody else knows of it when the device closes meanwhile

    async def close(self) -> None:
        """Gives everything back, in bounded time. Front ends are gone by now."""
        self._closing = True
        await self.rdma_return.close()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait({self._recovery})
        async with self._lock:
            for slab in list(self.mapped):
                with contextlib.suppress(InfiniswapError, TimeoutError):
                    await self._abandon(slab)
            session, lease = self._session, self._lease
            if session is not None:
                if session.ended is None and lease is not None:
                    with contextlib.suppress(InfiniswapError):
                        await session.release(lease.lease)
                await session.close()
            self._session = self._lease = None
