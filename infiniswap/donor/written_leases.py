# SPDX-License-Identifier: Apache-2.0
"""Leases over a restart of the daemon: written down as they change, taken over at the start."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.donor.leases import GrantedLease, LeaseRecord, LeaseTable
from infiniswap.donor.records import LeaseRecords
from infiniswap.engine.protocol import OffLoop
from infiniswap.engine.store import Store
from infiniswap.errors import EngineError, InfiniswapError
from infiniswap.units import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenLeases:
    """The leases as a successor will know them.

    Attributes:
        table: the leases.
        records: where they are written down; None: nowhere, they end with the daemon.
        off_loop: runs what blocks.
        counters: of the service.
    """

    table: LeaseTable
    records: LeaseRecords | None
    off_loop: OffLoop
    counters: Counter[str]

    def restore(self, records: Sequence[LeaseRecord], store: Store, now_s: float) -> None:
        """Takes over the predecessor's leases, each with its slabs, before anything is served."""
        for record in records:
            try:
                found = store.lease_restore(record.lease, record.slots_max, record.epoch)
            except EngineError as error:
                log.warning(
                    "lease %d is not taken over: %s",
                    record.lease,
                    error,
                    extra=events.about(events.LEASE_NOT_KEPT),
                )
                continue
            slots = [m.SlotInfo(slot.slot, slot.generation, slot.slab) for slot in found]
            self.table.restore(record, slots, now_s)
            self.counters["leases_restored"] += 1
            log.info(
                "lease %d of device %s of %s waits for it, with %s",
                record.lease,
                record.device_name,
                record.host_name,
                counted(len(found), "slab"),
            )
        store.restored()

    async def write_down(self, lease: GrantedLease) -> None:
        """Writes a lease down. If that fails, it is still served, but ends with a restart."""
        records = self.records
        if records is None or self.table.get(lease.lease) is not lease:
            return
        try:
            await self.off_loop(lambda: records.save(lease.record))
        except InfiniswapError as error:
            self.counters["records_failed"] += 1
            log.error(
                "lease %d will not survive a restart: %s",
                lease.lease,
                error,
                extra=events.about(events.LEASE_NOT_KEPT),
            )

    async def strike_out(self, lease: GrantedLease) -> None:
        """Removes the record of a lease that ends, so that it does not come back."""
        records = self.records
        if records is None:
            return
        try:
            await self.off_loop(lambda: records.remove(lease.lease))
        except InfiniswapError as error:
            # Its slabs are taken in any case: a successor finds a lease without slabs.
            self.counters["records_failed"] += 1
            log.error("lease %d: %s", lease.lease, error)
