# SPDX-License-Identifier: Apache-2.0
"""The way back to a donor after its connections or its session were lost.

The device reclaims the lease, with new connections, while there is time; otherwise it gives the
lease up. While a slab is suspended the engine reads from staging and backup, and clears the bit of
every page that is written. A reclaimed slab needs no copying: pages still marked valid are correct.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.channel import Ended
from infiniswap.device.donors.lease import HeldLease, LeaseGoneError, Place, is_gone
from infiniswap.device.donors.link_types import SlabKeeper
from infiniswap.device.donors.transports.search import TransportSearch
from infiniswap.engine.protocol import Engine
from infiniswap.errors import InfiniswapError
from infiniswap.policy.donor_faults import DonorFaults
from infiniswap.units import counted

if TYPE_CHECKING:
    from infiniswap.device.donors.link import DonorLink

log = logging.getLogger(__name__)

_RETRY_S_FIRST = 0.05
_RETRY_S_MAX = 0.5


class Recovery:
    """Recovers one link. Everything on the event loop.

    Args:
        link: which is recovered, for the keeper.
        engine: makes the connections.
        keeper: of the device's slabs.
        faults: of the donor.
        lock: under which session, lease and remote change.

    Attributes:
        detail: what is wrong with the donor, for tables; empty: nothing.
        search: for a better transport.
    """

    def __init__(
        self,
        link: DonorLink,
        engine: Engine,
        keeper: SlabKeeper,
        faults: DonorFaults,
        lock: asyncio.Lock,
    ) -> None:
        self.detail = ""
        self._link = link
        self._address = link.address
        self._engine = engine
        self._keeper = keeper
        self._session = link.session
        self._connections = link.connections
        self._slabs = link.slabs
        self.search = TransportSearch(self._connections.transport, self._probe, self.begin)
        self._faults = faults
        self._lock = lock
        self._down_s: float | None = None  # when the connections were lost
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the link is being recovered."""
        return self._task is not None

    @property
    def is_suspended(self) -> bool:
        """Whether no pages go over the link. They still do when only the session is missing."""
        return self._task is not None and self._down_s is not None

    async def settled(self) -> None:
        """Returns when no recovery is under way."""
        if self._task is not None:
            await asyncio.wait({self._task})

    # --------------------------------------------------------------------------- causes

    def inherit(self, remote: int, lease: HeldLease, mapped: Mapping[int, Place]) -> None:
        """A predecessor's lease and slabs, which the engine has SUSPENDED: reclaimed as after any
        loss of connections, or given up. Before anything else is asked of the link."""
        assert self._connections.remote is None
        assert self._connections.lease is None
        self._connections.remote, self._connections.lease = remote, lease
        self._slabs.places.update(mapped)
        self._down_s = asyncio.get_running_loop().time()
        self.detail = "taken over from a process that ended"
        self.begin()

    def session_ended(self, ended: Ended) -> None:
        """The session has ended."""
        is_closing = self._connections.is_closing
        if ended.is_broken and not is_closing:
            self._session_broken(ended.reason)
        if is_closing or self._connections.lease is None:
            return
        text, about = "donor %s: session ended (%s %s)", events.DONOR_SESSION_LOST
        extra = events.about(about, donor=self._address)
        log.warning(text, self._address, ended.reason, ended.detail, extra=extra)
        self.detail = f"session ended: {ended.reason}"
        if ended.by_peer and ended.reason == m.GOODBYE_SHUTDOWN:
            self._down_s = 0.0  # it will not come back, so there is no point in waiting
        self.begin()

    def connections_down(self, code: int) -> None:
        """ISW_EVENT_REMOTE_DOWN: the engine has suspended the slabs there."""
        if self._connections.is_closing or not self._connections.is_down:
            return  # about connections that a recovery has replaced since
        if self._down_s is None:
            self._down_s = asyncio.get_running_loop().time()
        self.detail = "connections lost"
        self._connections.counts.connections_lost += 1
        if self._task is None:
            self._judge(self._faults.lost(asyncio.get_running_loop().time(), code))
            if not self._faults.is_excused:
                self._connections.transport.lost()
            text = "donor %s: connections lost (code %d); %s suspended"
            text += ", pages come from the backup" if self._connections.config.has_backup else ""
            about = events.about(events.DONOR_SUSPENDED, donor=self._address)
            log.warning(
                text, self._address, code, counted(len(self._slabs.places), "slab"), extra=about
            )
        self.begin()

    def bad_page(self, page: int) -> None:
        """A page's bytes were not those that were written there."""
        why = self._faults.bad_page()
        if self._faults.bad_pages == 1:
            about = events.about(events.DONOR_DISTRUSTED, donor=self._address)
            log.error("donor %s: page %d came with other bytes", self._address, page, extra=about)
        if why and not self._connections.config.has_backup:
            self._faults.kept()
            self._keeper.avoided(self._link, why)
        else:
            self._judge(why)

    def refused(self) -> None:
        """The donor refuses requests for a slab that it had taken on."""
        self._judge(self._faults.refused(asyncio.get_running_loop().time()))

    def _session_broken(self, reason: str) -> None:
        self._connections.counts.sessions_broken[reason] += 1
        why = self._faults.session_broken(asyncio.get_running_loop().time())
        if self._connections.lease is not None:
            self._judge(why)
        elif why:
            self._keeper.distrusted(self._link, why)

    def _judge(self, why: str) -> None:
        # Without a backup the donor has the only copies: some of them are better than none.
        if why and self._connections.config.has_backup:
            self._down_s = 0.0
            self._keeper.distrusted(self._link, why)
            self._connections.shut_down()

    async def _probe(self) -> bool:
        """Whether a better transport works now. Short: a recovery or `ask` may wait for it."""
        wait_s = min(max(0.1, self._connections.config.suspend_s / 4), 0.5)
        try:
            async with asyncio.timeout(wait_s * 2), self._lock:
                session = self._session.current
                if session is None or session.ended or not self._link.is_usable:
                    return False
                if self._connections.lease is None:
                    return False
                return await self._connections.probe(session, self._slabs.places.values(), wait_s)
        except (InfiniswapError, TimeoutError) as error:
            log.debug("donor %s: a transport was not tried to the end: %s", self._address, error)
            return False

    # ----------------------------------------------------------------------- the way back

    def begin(self) -> None:
        """Recovers the link, if that is not under way."""
        self.search.interrupt()
        if self._task is None:
            name = f"recover donor {self._address}"
            self._task = asyncio.create_task(self._run(), name=name)

    async def _run(self) -> None:
        try:
            async with self._lock:
                if not await self._reclaim():
                    await self._give_up()
        except TimeoutError as error:  # of a drain: perhaps the host was suspended meanwhile
            log.warning("donor %s: not recovered yet: %s", self._address, error)
            await asyncio.sleep(_RETRY_S_MAX)
        except Exception:
            log.exception("donor %s: recovery failed; it is tried again", self._address)
            await asyncio.sleep(_RETRY_S_MAX)
        finally:
            self._task = None
            self._down_s = None
            # Session and connections may have been lost again before this task listened.
            connections = self._connections
            is_down, has_lease = connections.is_down, connections.lease is not None
            if is_down:
                self._down_s = asyncio.get_running_loop().time()
            if not connections.is_closing and (
                is_down or (has_lease and not self._session.is_open)
            ):
                self.begin()

    async def _reclaim(self) -> bool:
        """Tries to get the same lease back while there is time; returns whether it has."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        retry_s = _RETRY_S_FIRST
        again_s = started_s + self._faults.session_pause_s(started_s)
        while not self._connections.is_closing:
            suspend_s = self._connections.config.suspend_s
            # As long as the data connections work, a missing session costs nothing.
            since_s = self._down_s
            if since_s is not None and loop.time() > max(since_s, 0.0) + suspend_s:
                self.detail = "did not come back in time"
                return False
            if since_s is None and loop.time() < again_s:
                await asyncio.sleep(_RETRY_S_MAX)
                continue
            try:
                async with asyncio.timeout(max(0.2, suspend_s)):
                    await self._reclaim_once()
                    return True
            except (InfiniswapError, TimeoutError) as error:
                self.detail = str(error) or "no answer"
                if is_gone(error):
                    self.detail = f"lease gone: {error}"
                    return False
            if loop.time() - started_s > 60.0 and self._down_s is None:
                started_s = loop.time()
                text = "donor %s: no session, pages still flow: %s"
                log.warning(text, self._address, self.detail)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _RETRY_S_MAX)
        return False

    async def _reclaim_once(self) -> None:
        connections, places = self._connections, self._slabs.places
        lease, remote = connections.lease, connections.remote
        if lease is None or remote is None:
            raise LeaseGoneError("no lease to reclaim")
        session = await self._session.open(connections.config, lease)
        there = await connections.renew(session, lease, remote, places.values())
        for slab, place in list(places.items()):
            if place in there:
                self._engine.slab_resume(slab, remote, place.generation)
                self._keeper.arrived(slab)
            else:
                await self._slabs.abandon(slab)
        for place in there - set(places.values()):
            await session.unmap(lease.lease, place.slot, place.generation)
        connections.counts.reclaimed += 1
        self._faults.recovered(asyncio.get_running_loop().time())
        self.search.connected()
        text = "donor %s: back with the same lease, %s resumed"
        log.info(text, self._address, counted(len(places), "slab"))
        self.detail = ""

    async def _give_up(self) -> None:
        """Gives the lease up explicitly, so that the donor can never count as its former self."""
        lease, count = self._connections.lease, len(self._slabs.places)
        self._connections.shut_down()
        for slab in list(self._slabs.places):
            await self._slabs.abandon(slab)
        await self._connections.forget()
        self._faults.given_up()
        about = events.about(events.DONOR_GIVEN_UP, donor=self._address)
        text = "donor %s: given up (%s), %s unmapped"
        log.warning(text, self._address, self.detail, counted(count, "slab"), extra=about)
        await self._session.close(lease)

    async def close(self) -> None:
        """Ends the recovery that is under way, and the search."""
        await self.search.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
