# SPDX-License-Identifier: Apache-2.0
"""A host as a donor: its memory and pool, which the daemon's policies rule."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from infiniswap.policy.eviction import BatchChoice, Batches, EvictionConfig
from infiniswap.policy.headroom import HarvestPlan, HeadroomConfig, HeadroomPolicy, PoolState
from infiniswap.policy.placement import MemoryUse
from infiniswap.policy.quota import Tenant, tenants_over

if TYPE_CHECKING:
    from infiniswap.simulation.device import Device

MAKE_S: Final = 0.4
"""Time to allocate and zero a slab of 1 GiB (the paper, section 4.3)."""


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """A slab that a device has here.

    Attributes:
        device: whose it is.
        slab: its number there.
        epoch: of the donor; a donor that has failed for long has another one.
    """

    device: Device
    slab: int
    epoch: int


class DonorHost:
    """One host.

    Args:
        number: of the host.
        total_bytes: its memory.
        limits: of the pool.
        eviction: bounds of a batch.
        share_max: see infiniswap.policy.quota.
        rng: source of randomness.
        make_s_period: how long a period is, of which slabs are made one after the other.

    Attributes:
        own_bytes: in use by the host itself.
        held: every slab that is lent.
        share_max: see infiniswap.policy.quota.
        is_alive: answers.
        is_short: mapped slabs have to be taken back.
    """

    __slots__ = (
        *("number", "total_bytes", "policy", "pool", "held", "batches", "choice", "own_bytes"),
        *("is_alive", "is_short", "epoch", "share_max", "_by_tenant", "_slab_bytes"),
        "_made_max",
    )

    def __init__(
        self,
        number: int,
        total_bytes: int,
        limits: HeadroomConfig,
        eviction: EvictionConfig,
        share_max: float,
        rng: Random,
        make_s_period: float,
    ) -> None:
        self.number = number
        self.total_bytes = total_bytes
        self.policy = HeadroomPolicy(limits)
        self.pool = PoolState(0, 0, 0)
        self.held: dict[Lent, None] = {}
        self.batches = Batches()
        self.choice: BatchChoice[Lent] = BatchChoice(eviction, rng)
        self.own_bytes = 0
        self.is_alive = True
        self.is_short = False
        self.epoch = 0
        self.share_max = share_max
        self._by_tenant: Counter[Tenant[int]] = Counter()
        self._slab_bytes = limits.slab_bytes
        self._made_max = max(1, math.ceil(make_s_period / MAKE_S))

    def observe(self, now_s: float, own_bytes: int) -> HarvestPlan:
        """Takes a measurement and does at once what costs nothing: gives free slabs back, or makes
        some. The caller begins evictions."""
        self.own_bytes = own_bytes
        pool, policy, total_bytes = self.pool, self.policy, self.total_bytes
        used_bytes = own_bytes + (pool.free + pool.mapped) * self._slab_bytes
        policy.observe(now_s, total_bytes, max(0, total_bytes - used_bytes), pool)
        plan = policy.plan(pool)
        if plan.release:
            self.pool = PoolState(pool.free - plan.release, 0, pool.mapped)
        elif plan.grow:
            self.pool = PoolState(pool.free + min(plan.grow, self._made_max), 0, pool.mapped)
        self.is_short = plan.evict > 0
        return plan

    def use(self, device: Device) -> MemoryUse:
        """The answer to a device, as infiniswap.donor.room gives it."""
        pool = self.pool
        slabs = 0
        if not self.is_short:
            slabs = self.policy.slabs_mappable(pool) or len(self.gives(device))
        return MemoryUse(self.policy.used_share(pool), slabs)

    def used_share(self) -> float:
        """What placement compares."""
        return self.policy.used_share(self.pool)

    def gives(self, device: Device) -> list[Lent]:
        """Slabs of which one would be taken back for this device (infiniswap.donor.quota)."""
        slabs_max = self.policy.config.slabs_max
        over = tenants_over(self._by_tenant, device.tenant, slabs_max, self.share_max)
        return [lent for lent in self.held if lent.device.tenant in over] if over else []

    def make_ready(self) -> bool:
        """Makes a free slab for a device that waits; False: there is no memory for one."""
        pool = self.pool
        if pool.free:
            return True
        if self.policy.plan(pool).release or self.policy.slabs_mappable(pool) <= 0:
            return False
        self.pool = PoolState(pool.free + 1, 0, pool.mapped)
        return True

    def lend(self, device: Device, slab: int) -> Lent:
        """Lends a free slab."""
        lent = Lent(device, slab, self.epoch)
        self.held[lent] = None
        self._by_tenant[device.tenant] += 1
        self.pool = PoolState(self.pool.free - 1, 0, self.pool.mapped + 1)
        return lent

    def take(self, lent: Lent) -> bool:
        """A slab has come back; False: it is not lent."""
        if lent not in self.held:
            return False
        del self.held[lent]
        tenant = lent.device.tenant
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self.pool = PoolState(self.pool.free + 1, 0, self.pool.mapped - 1)
        return True

    def lose_everything(self) -> None:
        """The host has started afresh."""
        self.held.clear()
        self._by_tenant.clear()
        self.pool = PoolState(0, 0, 0)
        self.batches = Batches()
        self.epoch += 1
