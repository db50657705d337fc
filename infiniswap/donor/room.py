# SPDX-License-Identifier: Apache-2.0
"""Room for one more slab: whether there is any, why not, and how it is made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from infiniswap.control import messages as m
from infiniswap.donor.ahead import MappedAhead
from infiniswap.donor.drain import Drain
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.lease_work import LeaseWork
from infiniswap.donor.leases import GrantedLease
from infiniswap.donor.quota import Quota
from infiniswap.errors import RequestRefusedError
from infiniswap.policy.quota import Tenant
from infiniswap.units import counted, format_size, format_size_short

_PREPARE_S: Final = 1.5
"""How long a map request waits for a slab to be allocated. Shorter than the consumer waits for its
answer, so that it gets one."""


@dataclass(frozen=True, slots=True)
class Room:
    """What another slab would be made of: memory of the host, slabs that are lent and not used, and
    slabs of tenants that have more than their share."""

    harvester: Harvester
    drain: Drain
    ahead: MappedAhead
    quota: Quota
    work: LeaseWork

    def slabs(self, tenant: Tenant[str]) -> int:
        """How many slabs this tenant could get now; above zero if it could get any."""
        if self.drain.is_active or self.harvester.is_short or self.harvester.is_held:
            return 0
        if self.quota.keeps(tenant):
            return 0
        return (
            self.harvester.pool.mappable()
            or len(self.ahead.slabs())
            or self.quota.reclaimable(tenant)
        )

    def check_lending(self) -> None:
        """Raises RequestRefusedError while this donor is being drained."""
        if self.drain.is_active:
            raise RequestRefusedError("this donor is being drained", reason=m.REFUSED_DRAINING)

    def check_held(self) -> None:
        """Raises RequestRefusedError while nothing more is lent, to protect a service here."""
        if self.harvester.is_held:
            raise RequestRefusedError(f"the donor {self.why_none()}", reason=m.REFUSED_NO_MEMORY)

    def check_share(self, tenant: Tenant[str]) -> None:
        """Raises RequestRefusedError if a tenant keeps more than its share from others."""
        if self.quota.keeps(tenant):
            raise RequestRefusedError(
                f"the donor {self.why_none(tenant)}", reason=m.REFUSED_NO_MEMORY
            )

    def check_ahead(self) -> None:
        """Raises RequestRefusedError if a slab that is not written to yet has to wait."""
        if self.harvester.is_short or self.ahead.is_awaited:
            raise RequestRefusedError("others need it now", reason=m.REFUSED_NO_MEMORY)

    async def prepare(self, lease: GrantedLease) -> None:
        """Makes a slab free for a device that waits, for so long at most."""

        async def prepare() -> None:
            if await self.harvester.prepare() or self.harvester.is_short:
                return
            made_room = await self.ahead.make_room(lease.lease)
            if made_room or await self.quota.make_room(lease.tenant):
                await self.harvester.prepare()

        task = self.work.track(prepare())
        with self.ahead.awaited():
            # A slab that comes too late for this request is available for the next one.
            await asyncio.wait({task}, timeout=_PREPARE_S)

    def why_none(self, tenant: Tenant[str] | None = None) -> str:
        """Why this donor lends nothing more, in the words that its consumers show: a clause without
        a subject, which is the donor; empty when a slab could be lent.

        Args:
            tenant: to this one; None: to anybody.
        """
        harvester = self.harvester
        config, figures = harvester.policy.config, harvester.figures
        if self.drain.is_active:
            return "is drained (`infiniswap donor undrain HOST` ends that)"
        if harvester.is_held:
            return harvester.held_why
        if tenant is not None and self.quota.keeps(tenant):
            return (
                f"lends {tenant[0]} nothing more for now: that host has more than its share "
                "(daemon.consumer_share_max), and kept slabs that were asked back"
            )
        if harvester.pool.mappable() and not harvester.is_short:
            return ""
        if not figures.total_bytes:
            return "has not measured its memory yet"
        pool = harvester.pool.state()
        if pool.mapped >= config.slabs_max:
            size = format_size_short(config.pool_bytes_max)
            slabs = counted(pool.mapped, "slab")
            return f"has lent its whole pool of {size} (daemon.pool there), {slabs}"
        pool_bytes = pool.total * config.slab_bytes
        usual_bytes = figures.total_bytes - harvester.policy.others_bytes - pool_bytes
        now_bytes = figures.available_bytes - harvester.cache_bytes
        available = format_size_short(max(0, min(usual_bytes, now_bytes)))
        if pool.total >= config.slabs_max:
            return "zeroes the slabs that have come back: try again in a moment"
        if harvester.pool.is_refused:
            return f"gets no memory for another slab from its host, where {available} are available"
        return (
            f"needs its memory itself: {available} are available there, it keeps "
            f"{format_size_short(config.headroom_bytes)} as headroom (daemon.headroom), and a slab "
            f"takes {format_size(config.slab_bytes)}"
        )
