# SPDX-License-Identifier: Apache-2.0
"""Shares of the pool: no tenant keeps everything while another one needs memory."""

from __future__ import annotations

import logging
from collections import Counter

from infiniswap.donor.evict import Evictor
from infiniswap.donor.leases import LeaseState, LeaseTable
from infiniswap.policy.quota import Tenant, is_above_share, tenants_over

log = logging.getLogger(__name__)


class Quota:
    """Shares of the pool. A consumer is a host, however many devices and names it has: that of its
    certificate or, without certificates, its address. The tenants that it names divide its share.

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

    def reclaimable(self, tenant: Tenant[str]) -> int:
        """Slabs of others that would be taken back for this tenant."""
        return sum(self._over(tenant).values())

    async def make_room(self, tenant: Tenant[str]) -> bool:
        """Takes a slab back from a tenant with more than its share; False: there is none."""
        over = self._over(tenant)
        slabs = [
            (lease.lease, slot)
            for lease in self._table.leases()
            if lease.tenant in over and lease.state is not LeaseState.EXPIRED
            for slot in lease.slots
        ]
        if not slabs or not await self._evictor.evict(1, among=slabs):
            return False
        givers = " or ".join(map(_named, sorted(over)))
        log.info("a slab of %s was taken back for %s", givers, _named(tenant))
        return True

    def keeps(self, tenant: Tenant[str]) -> bool:
        """Whether this tenant's host has more than its share, and has lately kept slabs that were
        asked back: meanwhile it gets no further ones."""
        host = tenant[0]
        held = Counter[str]()
        for lease in self._table.leases():
            held[lease.consumer] += len(lease.slots)
        return is_above_share(held, host, self._slabs_max, self._share_max) and any(
            self._evictor.is_kept((lease.lease, slot))
            for lease in self._table.leases()
            if lease.consumer == host
            for slot in lease.slots
        )

    def _over(self, tenant: Tenant[str]) -> dict[Tenant[str], int]:
        held: Counter[Tenant[str]] = Counter()
        for lease in self._table.leases():
            held[lease.tenant] += len(lease.slots)
        return tenants_over(held, tenant, self._slabs_max, self._share_max)


def _named(tenant: Tenant[str]) -> str:
    host, name = tenant
    return f"tenant {name!r} of {host}" if name else host
