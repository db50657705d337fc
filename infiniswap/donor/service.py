# SPDX-License-Identifier: Apache-2.0
"""The donor behind the control API: its parts, and what is told of them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from random import Random
from typing import Any

from msgspec import Struct

from infiniswap.config import Config
from infiniswap.control import messages as m
from infiniswap.control.channel import Ended
from infiniswap.control.figures import Figures
from infiniswap.control.key_ring import KeyRing
from infiniswap.control.service import ServerSession
from infiniswap.control.text import clean_text
from infiniswap.donor import metrics
from infiniswap.donor.ahead import MappedAhead
from infiniswap.donor.drain import Drain, drain_path
from infiniswap.donor.evict import Evictor
from infiniswap.donor.expiry import LeaseExpiry
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.heat import Heat
from infiniswap.donor.identity import DonorIdentity
from infiniswap.donor.lease_work import LeaseWork
from infiniswap.donor.leases import LeaseTable, consumer_leases
from infiniswap.donor.lent import LentSlabs
from infiniswap.donor.quota import Quota
from infiniswap.donor.rdma import DonorRdma
from infiniswap.donor.records import LeaseRecords
from infiniswap.donor.report import DonorSnapshot, full_status
from infiniswap.donor.requests import LASTING_TICKET, Requests
from infiniswap.donor.room import Room
from infiniswap.donor.service_guard import make_guard
from infiniswap.donor.sessions import Sessions
from infiniswap.donor.transports import DonorTransport
from infiniswap.donor.written_leases import WrittenLeases
from infiniswap.engine.store import Store
from infiniswap.errors import EngineError
from infiniswap.policy.eviction import eviction_config


class DonorService:
    """The donor as the control API sees it (infiniswap.control.service.Service).

    Args:
        identity: who this is.
        config: the configuration.
        store: slab pool and data port.
        harvester: memory.
        executor: for blocking calls.
        clock: seconds, monotonic.
        rng: chooses which slabs may be evicted; None: the service makes one.
        records: where leases are written down for a successor; None: they end with this one.

    Attributes:
        started_unix_s: when it was made.
        control_port, data_port: where it serves; set when it does.
        degraded: sentences for the status, by who says them.
        counters: of the service and its parts.
        server_counters: of the control API; set by whoever makes its server.
        guard: protects a service of this host; None: none is named.
    """

    def __init__(
        self,
        identity: DonorIdentity,
        config: Config,
        store: Store,
        harvester: Harvester,
        executor: Executor,
        clock: Callable[[], float],
        rng: Random | None = None,
        records: LeaseRecords | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self.identity = identity
        self.keys = keys
        self.config = config
        self.store = store
        self.harvester = harvester
        self._clock = clock
        self._started_s = clock()
        self.started_unix_s = time.time()
        self.control_port = 0
        self.data_port = 0
        self.degraded: dict[str, list[str]] = {}
        self.counters = counters = Counter[str]()
        self.server_counters: Counter[str] = Counter()
        daemon = config.daemon
        self.table = table = LeaseTable(
            daemon.lease_grace_s,
            daemon.leases_max,
            consumer_leases(daemon.leases_max, daemon.connections_per_host_max),
        )
        self.work = work = LeaseWork(table, executor)
        self.sessions = Sessions(table, clock)
        self.heat = Heat(table, self.sessions, clock)
        self.lent = LentSlabs(table, self.sessions, store, work, counters)
        self.evictor = Evictor(self.lent, eviction_config(config), rng or Random(), clock, counters)
        self.guard = make_guard(config, harvester, self.evictor, clock, counters)
        self.drain = Drain(
            self.evictor,
            lambda: len(self.lent.mapped()),
            self.sessions.tell_draining,
            clock,
            drain_path(daemon.state_dir, identity.donor_id, daemon.listen.port),
            daemon.drain_move_s,
        )
        self.written = WrittenLeases(table, records, work.off_loop, counters)
        self.rdma = DonorRdma(store, table, work.off_loop, counters, daemon.rdma == "auto")
        self.transports: tuple[DonorTransport, ...] = (self.rdma,)
        slabs_max = harvester.policy.config.slabs_max
        self._quota = Quota(table, self.evictor, slabs_max, daemon.consumer_share_max)
        self._ahead = MappedAhead(table, self.evictor)
        self.room = Room(harvester, self.drain, self._ahead, self._quota, work)
        self.expiry = LeaseExpiry(table, store, work, self.written, clock, counters)
        self._requests = Requests(
            config=daemon,
            store=store,
            table=table,
            work=work,
            harvester=harvester,
            room=self.room,
            ahead=self._ahead,
            rdma=self.rdma,
            written=self.written,
            expiry=self.expiry,
            clock=clock,
            counters=counters,
        )

    def reconfigure(self, config: Config) -> None:
        """Goes by what has changed: limits of the pool (the policy's), eviction, draining, shares
        and RDMA."""
        self.config = config
        daemon = config.daemon
        self.evictor.config = eviction_config(config)
        self.drain.move_s = daemon.drain_move_s
        if self.guard is not None:
            self.guard.move_s = daemon.evict_move_s
        self._quota.limit(self.harvester.policy.config.slabs_max, daemon.consumer_share_max)
        self.rdma.enabled = daemon.rdma == "auto"

    def welcome(self, version: int, proof: str) -> m.Welcome:
        """See Service."""
        daemon, cluster = self.config.daemon, self.config.cluster
        return m.Welcome(
            version=version,
            proof=proof,
            donor_id=self.identity.donor_id,
            donor_name=self.identity.name,
            incarnation=self.identity.incarnation,
            slab_bytes=daemon.slab_bytes,
            data_port=self.data_port,
            grace_ms=round(daemon.lease_grace_s * 1000),
            heartbeat_ms=round(cluster.heartbeat_s * 1000),
            silence_ms=round(cluster.heartbeat_s * cluster.heartbeats_missed_max * 1000),
            draining=self.drain.is_active,
            rdma=self.rdma.enabled,
            maps_ahead=True,
            test_page=True,
        )

    def session_opened(self, session: ServerSession) -> None:
        """See Service."""
        self.sessions.opened(session)

    def session_closed(self, session: ServerSession, ended: Ended) -> None:
        """See Service."""
        for lease in self.sessions.closed(session, ended):
            with contextlib.suppress(EngineError):  # it is being destroyed
                self.store.ticket_end(lease.lease, LASTING_TICKET)

    async def set_draining(self, draining: bool, *, force: bool = False) -> m.DrainInfo:
        """See Service."""
        warning = await self.drain.set(draining, force=force)
        return m.DrainInfo(
            donor_id=self.identity.donor_id,
            donor_name=self.identity.name,
            draining=self.drain.is_active,
            slabs_mapped=len(self.lent.mapped()),
            warning=clean_text(warning),
        )

    async def handle(self, session: ServerSession, request: Any) -> Struct:
        """See Service."""
        return await self._requests.handle(session, request)

    async def evict_some(self, count: int, urgent: bool) -> int:
        """For the harvester: takes slabs back; returns how many came."""
        unused = self._ahead.slabs()
        if unused:  # which costs no consumer anything
            return await self.evictor.evict(min(count, len(unused)), unused)
        move_s = 0.0 if urgent else self.config.daemon.evict_move_s
        came = await self.evictor.evict(count, move_s=move_s)
        bounds, since_s = self.evictor.config, self.harvester.broken_since_s
        patience_s = bounds.refused_s if urgent else bounds.last_copy_s
        if came or since_s is None or self._clock() - since_s < patience_s:
            return came
        return await self.evictor.evict(count, move_s=move_s, kept_since_s=since_s)

    def status(self) -> m.Status:
        """See Service."""
        return full_status(self)

    async def refresh(self) -> None:
        """See Service."""
        await self.heat.refresh()

    def figures(self) -> Figures:
        """See Service."""
        return metrics.values(DonorSnapshot(self))

    def uptime_s(self) -> float:
        """Since it was made."""
        return max(0.0, self._clock() - self._started_s)
