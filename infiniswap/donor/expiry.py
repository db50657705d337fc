# SPDX-License-Identifier: Apache-2.0
"""How leases end: released by their device, or expired because it did not come back."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from infiniswap import events
from infiniswap.donor.lease_work import LeaseWork
from infiniswap.donor.leases import ALONE_S, GrantedLease, LeaseTable
from infiniswap.donor.written_leases import WrittenLeases
from infiniswap.engine.store import Store
from infiniswap.errors import EngineError, InfiniswapError
from infiniswap.ticks import next_tick
from infiniswap.units import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseExpiry:
    """Ends leases.

    Attributes:
        clock: seconds, monotonic.
        counters: lease_errors, leases_expired.
    """

    table: LeaseTable
    store: Store
    work: LeaseWork
    written: WrittenLeases
    clock: Callable[[], float]
    counters: Counter[str]

    async def run(self, period_s: float) -> None:
        """Looks for expired leases until cancelled."""
        while True:
            try:
                await self._look()
            except InfiniswapError as error:
                # A lease that cannot be ended must not keep all others alive.
                self.counters["lease_errors"] += 1
                log.error("a lease cannot be ended: %s", error)
            await next_tick(period_s)

    async def _look(self) -> None:
        counts = []
        for lease in self.table.leases():
            # A lease that is being released leaves the store before it leaves the table.
            with contextlib.suppress(EngineError):
                stats = self.store.lease_stats(lease.lease)
                counts.append((lease.lease, stats.connections))
                lease.traffic.take(stats.read_bytes + stats.write_bytes, self.clock())
        for lease in self.table.observe(counts, self.clock()):
            self.counters["leases_expired"] += 1
            why = "expired: its device did not come back"
            if lease.connections:
                why = f"expired: its device had no session for {ALONE_S:g} s"
            await self.work.whole(self.end(lease, why, events.LEASE_EXPIRED), lease.lease)

    async def end(self, lease: GrantedLease, why: str, event: events.Event | None = None) -> None:
        """Ends an expired lease; its slabs are free again. Under the lease's lock.

        Raises:
            EngineError: the store could not.
        """
        slots = len(lease.slots)
        # First, so that a half-removed lease does not come back with a successor.
        await self.written.strike_out(lease)
        try:
            await self.work.off_loop(lambda: self.store.lease_destroy(lease.lease))
        finally:
            self.table.remove(lease.lease)
            self.work.forget(lease.lease)
        log.info(
            "lease %d of device %s of %s %s; free again: %s",
            lease.lease,
            lease.record.device_name,
            lease.record.host_name,
            why,
            counted(slots, "slab"),
            extra=None if event is None else events.about(event),
        )
