# SPDX-License-Identifier: Apache-2.0
"""Shares of the pool: no consumer keeps everything while another one needs memory."""

from __future__ import annotations

import logging
from collections import Counter

from infiniswap.donor.evict import Evictor
from infiniswap.donor.leases import LeaseState, LeaseTable
from infiniswap.policy.quota import over_quota

log = logging.getLogger(__name__)


class Quota:
    """Shares of the pool. A consumer is a host, however many devices and names it has: that of its
    certificate or, without certificates, its address.

    Args:
        table: leases.
        evictor: takes slabs back.
        slabs_max: of the whole pool.
        share_max: see infiniswap.policy.quota.
    """

    def __init__(
        self, table: LeaseTable, evictor: Evictor, slabs_max: int, share_max: float
    ) -> None:
        self._table = table
        self._evictor = evictor
        self.limit(slabs_max, share_max)

    def limit(self, slabs_max: int, share_max: float) -> None:
        """Uses other shares from now on."""
        self._slabs_max = slabs_max
        self._share_max = share_max

    def reclaimable(self, consumer: str) -> int:
        """Slabs of others that would be taken back for this consumer."""
        return sum(self._over(consumer).values())

    async def make_room(self, consumer: str) -> bool:
        """Takes a slab back from a consumer with more than its share; False: there is none."""
        over = self._over(consumer)
        slabs = [
            (lease.lease, slot)
            for lease in self._table.leases()
            if lease.consumer in over and lease.state is not LeaseState.EXPIRED
            for slot in lease.slots
        ]
        if not slabs or not await self._evictor.evict(1, among=slabs):
            return False
        log.info("a slab of %s was taken back for %s", " or ".join(sorted(over)), consumer)
        return True

    def _over(self, consumer: str) -> dict[str, int]:
        held: Counter[str] = Counter()
        for lease in self._table.leases():
            held[lease.consumer] += len(lease.slots)
        return over_quota(held, consumer, self._slabs_max, self._share_max)
