# SPDX-License-Identifier: Apache-2.0
"""Leases over a restart of the daemon: written down as they change, taken over at the start."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.donor.leases import GrantedLease, LeaseOwner, LeaseTable
from infiniswap.donor.records import LeaseRecord, LeaseRecords
from infiniswap.engine.protocol import OffLoop, Store
from infiniswap.errors import EngineError, InfiniswapError

log = logging.getLogger(__name__)


class WrittenLeases:
    """What a successor will know of the leases.

    Args:
        table: the leases.
        records: where they are written down; None: nowhere, they end with the daemon.
        off_loop: runs what blocks.
        counters: of the service.
    """

    def __init__(
        self,
        table: LeaseTable,
        records: LeaseRecords | None,
        off_loop: OffLoop,
        counters: Counter[str],
    ) -> None:
        self._table = table
        self._records = records
        self._off_loop = off_loop
        self._counters = counters

    def restore(self, records: Sequence[LeaseRecord], store: Store, now_s: float) -> None:
        """Before anything is served: the leases of the predecessor, each with its slabs."""
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
            self._table.restore(
                record.lease,
                LeaseOwner(record.device_id, record.device_name, record.host_name, record.address),
                record.slots_max,
                record.reclaim,
                record.epoch,
                [m.SlotInfo(slot.slot, slot.generation, slot.slab) for slot in found],
                now_s,
            )
            self._counters["leases_restored"] += 1
            log.info(
                "lease %d of device %s of %s waits for it, with %d slabs",
                record.lease,
                record.device_name,
                record.host_name,
                len(found),
            )
        store.restored()

    async def write_down(self, lease: GrantedLease) -> None:
        """A lease that cannot be written down is served all the same; a restart ends it."""
        owner, records = lease.owner, self._records
        if records is None or self._table.get(lease.lease) is not lease:
            return
        record = LeaseRecord(
            lease=lease.lease,
            device_id=owner.device_id,
            device_name=owner.device_name,
            host_name=owner.host_name,
            address=owner.address,
            slots_max=lease.slots_max,
            reclaim=lease.reclaim,
            epoch=lease.epoch,
        )
        try:
            await self._off_loop(lambda: records.save(record))
        except InfiniswapError as error:
            self._counters["records_failed"] += 1
            log.error(
                "lease %d will not survive a restart: %s",
                lease.lease,
                error,
                extra=events.about(events.LEASE_NOT_KEPT),
            )

    async def strike_out(self, lease: GrantedLease) -> None:
        """The lease ends: it must not come back."""
        records = self._records
        if records is None:
            return
        try:
            await self._off_loop(lambda: records.remove(lease.lease))
        except InfiniswapError as error:
            # Its slabs are taken all the same: a successor finds a lease without any.
            self._counters["records_failed"] += 1
            log.error("lease %d: %s", lease.lease, error)
