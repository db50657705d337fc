# SPDX-License-Identifier: Apache-2.0
"""Keeps the slab pool in step with the host's memory.

Once per period: read the memory figures, zero what consumers gave back, then grow or shrink the
free part of the pool as `HeadroomPolicy` says. Everything that touches slab memory blocks for up
to half a second per slab, so it runs in a small thread pool, one slab at a time under one lock,
and the figures are read again before the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from infiniswap.engine.protocol import Store
from infiniswap.errors import EngineError, InfiniswapError
from infiniswap.policy.headroom import HeadroomPolicy, PoolState
from infiniswap.units import format_size_short

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_RETRY_S = 10.0
"""After the host refused memory for a slab."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of the host, or of the cgroup that bounds the daemon, in bytes."""

    total_bytes: int
    available_bytes: int


class MemorySource(Protocol):
    """Where the figures come from."""

    @property
    def name(self) -> str:
        """For status: "host", or the path of a cgroup."""

    def read(self) -> MemoryFigures:
        """Blocking, for a worker thread. Raises InfiniswapError."""


class Harvester:
    """The pool and its figures.

    Args:
        store: the slab pool.
        policy: limits.
        memory: figures.
        executor: a few threads for blocking calls.
        clock: seconds, monotonic.
        period_s: distance of ticks.
    """

    def __init__(
        self,
        store: Store,
        policy: HeadroomPolicy,
        memory: MemorySource,
        executor: Executor,
        clock: Callable[[], float],
        period_s: float = 1.0,
    ) -> None:
        self._store = store
        self._policy = policy
        self._memory = memory
        self._executor = executor
        self._clock = clock
        self._period_s = period_s
        self._lock = asyncio.Lock()
        self._figures = MemoryFigures(0, 0)
        self._read_s = float("-inf")
        self._refused_until_s = float("-inf")
        self._short = False
        self._blind = False
        self._unpinned_told = False
        self.counters: Counter[str] = Counter()

    @property
    def policy(self) -> HeadroomPolicy:
        """Limits given at the start."""
        return self._policy

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return self._memory.name

    @property
    def figures(self) -> MemoryFigures:
        """The newest figures; zeros before the first reading."""
        return self._figures

    def pool(self) -> PoolState:
        """The pool, now."""
        stats = self._store.stats()
        return PoolState(stats["slabs_free"], stats["slabs_dirty"], stats["slabs_mapped"])

    def used_share(self) -> float:
        """Share of the memory that cannot be lent, 0..1."""
        return self._policy.used_share(self.pool())

    def slabs_mappable(self) -> int:
        """Slabs that could be mapped now, those still to be allocated included."""
        pool = self.pool()
        if self._clock() < self._refused_until_s:
            return pool.free
        return self._policy.slabs_mappable(pool)

    async def refresh(self, age_s_max: float = 0.1) -> None:
        """Reads the figures again unless they are younger than that.

        Raises:
            InfiniswapError: they cannot be read.
        """
        if self._clock() - self._read_s <= age_s_max:
            return
        figures = await self._off_loop(self._memory.read)
        self._figures = figures
        self._read_s = self._clock()
        self._policy.observe(
            self._read_s, figures.total_bytes, figures.available_bytes, self.pool()
        )

    async def run(self) -> None:
        """Ticks until cancelled."""
        while True:
            try:
                await self.tick()
            except InfiniswapError as error:
                # Without figures the pool keeps its size; growing blindly could hurt the host.
                self.counters["harvest_errors"] += 1
                if not self._blind:
                    log.error("memory cannot be harvested: %s", error)
                self._blind = True
            else:
                if self._blind:
                    log.info("memory can be harvested again")
                self._blind = False
            await asyncio.sleep(self._period_s)

    async def tick(self) -> None:
        """One round: read, scrub, then grow or shrink by as much as fits into one period."""
        end_s = self._clock() + self._period_s
        await self.refresh(0.0)
        while self.pool().dirty and await self._scrub():
            pass
        released = 0
        while (plan := self._policy.plan(self.pool())).release and await self._release():
            released += 1
            await self.refresh(0.0)
        if released:
            size = format_size_short(released * self._policy.config.slab_bytes)
            log.info("gave %d free slabs (%s) back to this host", released, size)
        while plan.grow and self._clock() < end_s and await self._grow():
            await self.refresh(0.0)
            plan = self._policy.plan(self.pool())
        self._report(plan.evict)

    async def prepare(self) -> bool:
        """Makes one more slab free, for a consumer that waits; False when there is no memory."""
        await self.refresh()
        if self.pool().free:
            return True
        if self.pool().dirty and await self._scrub():
            return True
        return self.slabs_mappable() > 0 and await self._grow()

    async def _scrub(self) -> bool:
        async with self._lock:
            return await self._off_loop(self._store.scrub)

    async def _release(self) -> bool:
        async with self._lock:
            done = await self._off_loop(self._store.release_free)
        self.counters["slabs_released"] += done
        return done

    async def _grow(self) -> bool:
        async with self._lock:
            if self.slabs_mappable() <= self.pool().free:
                return False
            try:
                await self._off_loop(self._store.preallocate)
            except EngineError as error:
                self._refused_until_s = self._clock() + _RETRY_S
                self.counters["slabs_refused"] += 1
                log.warning("this host gives no memory for another slab: %s", error)
                return False
        self.counters["slabs_allocated"] += 1
        return True

    async def _off_loop(self, call: Callable[[], ResultT]) -> ResultT:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, call)

    def _report(self, evict: int) -> None:
        """Says once when the host gets short of memory, and when that is over."""
        if evict and not self._short:
            log.warning(
                "this host is short of memory: %d lent slabs should be taken back "
                "(available %s, headroom %s)",
                evict,
                format_size_short(self._figures.available_bytes),
                format_size_short(self._policy.config.headroom_bytes),
            )
        elif self._short and not evict:
            log.info("this host has its headroom again")
        self._short = bool(evict)
        self.counters["evictions_wanted"] += evict
        unpinned = self._store.stats()["slabs_unpinned"]
        if unpinned and not self._unpinned_told:
            self._unpinned_told = True
            log.warning(
                "%d slabs are not pinned: this host may swap them out. "
                "Raise the locked-memory limit (ulimit -l, LimitMEMLOCK=infinity)",
                unpinned,
            )
