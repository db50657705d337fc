# SPDX-License-Identifier: Apache-2.0
"""How leases end: released by their device, or expired because it did not come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from infiniswap import events
from infiniswap.donor.lease_work import LeaseWork
from infiniswap.donor.leases import GrantedLease, LeaseTable
from infiniswap.donor.written_leases import WrittenLeases
from infiniswap.engine.protocol import Store
from infiniswap.errors import EngineError, InfiniswapError

log = logging.getLogger(__name__)


class LeaseExpiry:
    """Ends leases.

    Args:
        table: leases.
        store: slab pool.
        work: see LeaseWork.
        written: what a successor will know of the leases.
        clock: seconds, monotonic.
        alone_s: see LeaseTable; for the log.
        counters: lease_errors, leases_expired.
    """

    def __init__(
        self,
        table: LeaseTable,
        store: Store,
        work: LeaseWork,
        written: WrittenLeases,
        clock: Callable[[], float],
        alone_s: float,
        counters: Counter[str],
    ) -> None:
        self._table = table
        self._store = store
        self._work = work
        self._written = written
        self._clock = clock
        self._alone_s = alone_s
        self._counters = counters

    async def run(self, period_s: float) -> None:
        """Looks for expired leases until cancelled."""
        while True:
            try:
                await self._look()
            except InfiniswapError as error:
                # One lease that cannot be ended must not keep all others alive.
                self._counters["lease_errors"] += 1
                log.error("a lease cannot be ended: %s", error)
            await asyncio.sleep(period_s)

    async def _look(self) -> None:
        counts = []
        for lease in self._table.leases():
            # A lease that is being released is gone from the store before it is from the table.
            with contextlib.suppress(EngineError):
                counts.append((lease.lease, self._store.lease_stats(lease.lease).connections))
        for lease in self._table.observe(counts, self._clock()):
            self._counters["leases_expired"] += 1
            why = "expired: its device did not come back"
            if lease.connections:
                why = f"expired: its device had no session for {self._alone_s:g} s"
            await self._work.whole(self.end(lease, why, events.LEASE_EXPIRED), lease.lease)

    async def end(self, lease: GrantedLease, why: str, event: events.Event | None = None) -> None:
        """Ends an expired lease; its slabs are free again. Under the lease's lock.

        Raises:
            EngineError: the store could not.
        """
        slots = len(lease.slots)
        # First, so that a lease half gone does not come back with a successor.
        await self._written.strike_out(lease)
        try:
            await self._work.off_loop(lambda: self._store.lease_destroy(lease.lease))
        finally:
            self._table.remove(lease.lease)
            self._work.forget(lease.lease)
        log.info(
            "lease %d of device %s of %s %s; %d slabs are free again",
            lease.lease,
            lease.owner.device_name,
            lease.owner.host_name,
            why,
            slots,
            extra=None if event is None else events.about(event),
        )
