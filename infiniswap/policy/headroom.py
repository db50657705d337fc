# SPDX-License-Identifier: Apache-2.0
"""How much of a donor's memory may be lent right now.

The paper, section 4.3: the daemon keeps a headroom (8 GiB of 64) of free memory for the host's own
applications. It follows the memory use of everything else on the host with
`U = beta·measured + (1 - beta)·U_old`, beta = 0.2, once per second. With more than the headroom
free it allocates slabs ahead of demand, which hides the time of allocation from consumers; with
less it gives free slabs back first, then evicts mapped ones.

Three things differ from the paper. Sudden use does not wait for the average: once half of the
headroom is used, mapped slabs are evicted by the newest figures. Page cache that is read repeatedly
counts as used (infiniswap.policy.cache). And we read MemAvailable, not MemFree, because page cache
that the kernel would drop is not in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from infiniswap.policy.ewma import Ewma


@dataclass(frozen=True, slots=True)
class HeadroomConfig:
    """Limits of the pool. All sizes in bytes.

    Attributes:
        slab_bytes: size of a slab.
        headroom_bytes: memory that stays free for the host's own applications.
        pool_bytes_max: upper bound of memory lent or kept ready; rounded down to slabs.
        hysteresis_bytes: free memory beyond the headroom that must remain after growing, so that
            a little noise does not allocate and release the same slab repeatedly.
        free_slabs_max: free slabs kept ready; None: as many as fit, as in the paper.
        beta: weight of the newest measurement.
        period_s: nominal distance of measurements, seconds.
    """

    slab_bytes: int
    headroom_bytes: int
    pool_bytes_max: int
    hysteresis_bytes: int = 0
    free_slabs_max: int | None = None
    beta: float = 0.2
    period_s: float = 1.0

    def __post_init__(self) -> None:
        if self.slab_bytes <= 0:
            raise ValueError(f"slab size {self.slab_bytes} is not above zero")
        for name in ("headroom_bytes", "pool_bytes_max", "hysteresis_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is below zero")

    @property
    def slabs_max(self) -> int:
        """Slabs of a full pool."""
        return self.pool_bytes_max // self.slab_bytes


def pool_bytes_auto(total_bytes: int, headroom_bytes: int, slab_bytes: int) -> int:
    """`--pool auto`: everything beyond the headroom, in whole slabs."""
    return max(0, total_bytes - headroom_bytes) // slab_bytes * slab_bytes


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the pool holds, in slabs; all of them occupy memory.

    Attributes:
        free: zeroed and ready to be mapped.
        dirty: released, not zeroed yet.
        mapped: lent.
    """

    free: int
    dirty: int
    mapped: int

    @property
    def total(self) -> int:
        """Slabs that occupy memory."""
        return self.free + self.dirty + self.mapped


@dataclass(frozen=True, slots=True)
class HarvestPlan:
    """What to do with the pool until the next tick, in slabs. At most one of grow and the
    others is above zero.

    Attributes:
        grow: free slabs to allocate.
        release: free or dirty slabs to give back to the host; never more than there are.
        evict: mapped slabs to take back (the paper's E).
        urgent: their consumers get no time to copy them elsewhere first.
        broken: mapped slabs have to go for the headroom, and not only for a smaller pool.
    """

    grow: int
    release: int
    evict: int
    urgent: bool = False
    broken: bool = False


URGENT_FRACTION = 0.5
"""Below this part of the headroom the newest figures count instead of the average."""


class HeadroomPolicy:
    """Follows the host's memory and says what to do with the pool.

    Args:
        config: limits.
    """

    def __init__(self, config: HeadroomConfig) -> None:
        self._config = config
        self._others = Ewma(config.beta, config.period_s)
        self._others_now_bytes = 0
        self._total_bytes = 0
        self._mapped = 0

    @property
    def config(self) -> HeadroomConfig:
        """Limits in force."""
        return self._config

    def limit(self, config: HeadroomConfig) -> None:
        """Uses other limits from now on; weight and period of the average stay.

        Raises:
            ValueError: another slab size.
        """
        if config.slab_bytes != self._config.slab_bytes:
            raise ValueError("the slab size of a pool cannot change")
        self._config = config

    @property
    def others_bytes(self) -> int:
        """Average memory use of everything but the pool, bytes; 0 before the first tick."""
        return int(self._others.value or 0.0)

    @property
    def slack_bytes(self) -> int:
        """How much more the host may take before mapped slabs are evicted at once, by the newest
        figures; free slabs count as given back."""
        return self._room_bytes(
            self._others_now_bytes, self._mapped, int(self._config.headroom_bytes * URGENT_FRACTION)
        )

    def observe(
        self, now_s: float, total_bytes: int, available_bytes: int, pool: PoolState
    ) -> None:
        """Takes a measurement.

        Args:
            now_s: seconds of the clock used throughout.
            total_bytes: memory of the host (or of the cgroup that bounds the daemon).
            available_bytes: MemAvailable of the same.
            pool: the pool at the same moment.
        """
        used_bytes = max(0, total_bytes - available_bytes)
        self._total_bytes = max(0, total_bytes)
        self._mapped = pool.mapped
        self._others_now_bytes = max(0, used_bytes - pool.total * self._config.slab_bytes)
        self._others.update(now_s, self._others_now_bytes)

    def used_share(self, pool: PoolState) -> float:
        """Share of the memory that can no longer be lent, 0..1: the average use of everything
        else, plus mapped slabs. Free slabs count as free, because they are there to be taken.
        Placement compares this figure.
        """
        if self._total_bytes == 0:
            return 1.0
        used_bytes = self.others_bytes + pool.mapped * self._config.slab_bytes
        return min(1.0, max(0.0, used_bytes / self._total_bytes))

    def plan(self, pool: PoolState) -> HarvestPlan:
        """What to do with the pool now; nothing before the first measurement.

        Growing and releasing go by the higher of average and newest use: both cost little and
        should not wait for the average. Eviction, which costs consumers, goes by the average,
        unless the newest figures leave less than URGENT_FRACTION of the headroom.
        """
        if self._others.value is None:
            return HarvestPlan(0, 0, 0)
        slab_bytes, headroom_bytes = self._config.slab_bytes, self._config.headroom_bytes
        over = max(0, pool.total - self._config.slabs_max)
        unmapped = pool.free + pool.dirty
        highest_bytes = max(self.others_bytes, self._others_now_bytes)
        cautious_bytes = self._room_bytes(highest_bytes, pool.total, headroom_bytes)
        if cautious_bytes < 0 or over:
            release = min(unmapped, max(over, -(cautious_bytes // slab_bytes)))
            left = pool.total - release
            urgent_bytes = int(headroom_bytes * URGENT_FRACTION)
            urgent = self._room_bytes(self._others_now_bytes, left, urgent_bytes) < 0
            room_bytes = self._room_bytes(
                highest_bytes if urgent else self.others_bytes, left, headroom_bytes
            )
            evict = min(pool.mapped, max(-(room_bytes // slab_bytes), over - release, 0))
            is_broken = evict > 0 and room_bytes < 0
            return HarvestPlan(0, release, evict, urgent and evict > 0, is_broken)
        spare = self._free_slabs_over(pool)
        if spare:
            return HarvestPlan(0, spare, 0)
        return HarvestPlan(self._growth(cautious_bytes, pool), 0, 0)

    def slabs_mappable(self, pool: PoolState) -> int:
        """Slabs that could be lent at once: the free ones and those that would fit beside them."""
        if self._others.value is None:
            return pool.free
        cautious = max(self.others_bytes, self._others_now_bytes)
        room_bytes = self._room_bytes(cautious, pool.total, self._config.headroom_bytes)
        return pool.free + self._fitting(room_bytes, pool)

    def _room_bytes(self, others_bytes: int, slabs: int, headroom_bytes: int) -> int:
        pool_bytes = slabs * self._config.slab_bytes
        return self._total_bytes - headroom_bytes - others_bytes - pool_bytes

    def _fitting(self, room_bytes: int, pool: PoolState) -> int:
        fitting = (room_bytes - self._config.hysteresis_bytes) // self._config.slab_bytes
        return max(0, min(fitting, self._config.slabs_max - pool.total))

    def _growth(self, room_bytes: int, pool: PoolState) -> int:
        fitting = self._fitting(room_bytes, pool)
        if self._config.free_slabs_max is None:
            return fitting
        return max(0, min(fitting, self._config.free_slabs_max - pool.free - pool.dirty))

    def _free_slabs_over(self, pool: PoolState) -> int:
        if self._config.free_slabs_max is None:
            return 0
        return max(0, min(pool.free, pool.free + pool.dirty - self._config.free_slabs_max))
