# SPDX-License-Identifier: Apache-2.0
"""Keeps the slab pool in step with the host's memory.

The figures are read once per period, and up to twenty times a second while memory is short or
nearly so (infiniswap.policy.sampling). Each tick acts on its reading: free slabs are given back in
the same tick, and a batch eviction beside it takes mapped ones back. Making or zeroing a slab takes
up to half a second, so it never delays a tick: it happens beside the ticks, one slab at a time, and
the figures are read again before the next slab.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from infiniswap import events
from infiniswap.donor.memory import MemoryFigures, MemorySource
from infiniswap.donor.pool import SlabPool
from infiniswap.engine.store import Store
from infiniswap.errors import InfiniswapError, SystemCallError
from infiniswap.policy.cache import CacheUse
from infiniswap.policy.eviction import Batch, Batches
from infiniswap.policy.headroom import HeadroomPolicy
from infiniswap.policy.sampling import SamplingConfig, sample_s
from infiniswap.policy.slo import UNLIMITED
from infiniswap.system.memory import Cache
from infiniswap.ticks import tick_pause_s
from infiniswap.units import counted, format_size_short

log = logging.getLogger(__name__)

_SAMPLE_S_MIN = 0.05
_OF_PERIOD = 0.9
"""The page cache is read again after so much of a period: ticks come a little early or late."""


Evict = Callable[[int, bool], Awaitable[int]]
"""Takes so many mapped slabs back, urgently or not; returns how many it got. Bounded in time."""


class Harvester:
    """The pool and its figures.

    Args:
        store: the slab pool.
        policy: limits.
        memory: figures.
        executor: a few threads for blocking calls.
        clock: seconds, monotonic.
        period_s: distance of ticks.
        background: for work that no caller waits for; None: the executor.

    Attributes:
        pool: slabs.
        figures: the newest; zeros before the first reading.
        is_short: whether mapped slabs have to be taken back.
        broken_since_s: since when the headroom has been broken without a break; None: it is not.
        mapped_max: so many slabs may be lent, to protect a service of this host.
        held_why: why nothing more is lent where that many are; see Room.why_none.
        evict: takes them back; None: nothing does.
        counters: of the harvester and the pool.
    """

    def __init__(
        self,
        store: Store,
        policy: HeadroomPolicy,
        memory: MemorySource,
        executor: Executor,
        clock: Callable[[], float],
        period_s: float = 1.0,
        background: Executor | None = None,
    ) -> None:
        self.policy = policy
        self.memory = memory
        self._executor = executor
        self._background = background or executor
        self._clock = clock
        self._period_s = period_s
        self._sampling = SamplingConfig(min(_SAMPLE_S_MIN, period_s), period_s)
        self._cache = CacheUse()
        self._cache_read_s = float("-inf")
        self._wake = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None
        self._batches = Batches()
        self._evictions: set[asyncio.Task[None]] = set()
        self.figures = MemoryFigures(0, 0)
        self._read_s = float("-inf")
        self.is_short = False
        self.mapped_max = UNLIMITED
        self.held_why = ""
        self._blind = False
        self.broken_since_s: float | None = None
        self.evict: Evict | None = None
        self.counters: Counter[str] = Counter()
        self.pool = SlabPool(store, policy, executor, clock, self.counters)

    @property
    def cache_bytes(self) -> int:
        """Page cache in use: it is being read again and again."""
        return self._cache.used_bytes

    @property
    def is_held(self) -> bool:
        """Whether nothing more is lent, to protect a service of this host."""
        return self.pool.state().mapped >= self.mapped_max

    def used_share(self) -> float:
        """Share of the memory that cannot be lent, 0..1."""
        return self.policy.used_share(self.pool.state())

    async def refresh(self, age_s_max: float = 0.1) -> None:
        """Reads the figures again unless they are younger than that.

        Raises:
            InfiniswapError: they cannot be read, or cannot be true.
        """
        if self._clock() - self._read_s <= age_s_max:
            return
        figures, cache = await asyncio.get_running_loop().run_in_executor(
            self._executor, self._read, self._is_cache_due()
        )
        if not 0 <= figures.available_bytes <= figures.total_bytes or not figures.total_bytes:
            # Lending by them could take what is not there.
            self.counters["figures_refused"] += 1
            raise SystemCallError(
                f"memory figures that cannot be true: {figures.available_bytes} bytes available "
                f"of {figures.total_bytes}",
                where=self.memory.name,
                mend="What is lent stays, no further slab is made. Look at where they come from.",
            )
        self.figures = figures
        self._read_s = self._clock()
        if cache is not None:
            self._note_cache(cache)
        # Cache in use is memory in use.
        available_bytes = max(0, figures.available_bytes - self._cache.used_bytes)
        self.policy.observe(self._read_s, figures.total_bytes, available_bytes, self.pool.state())

    def _is_cache_due(self) -> bool:
        return self._clock() - self._cache_read_s > _OF_PERIOD * self._period_s

    def _read(self, cache_too: bool) -> tuple[MemoryFigures, Cache | None]:
        """Reads the figures, and then the page cache of the cgroup that limits them. Blocks."""
        return self.memory.read(), self.memory.cache() if cache_too else None

    def _note_cache(self, cache: Cache) -> None:
        self._cache_read_s = self._read_s
        was = self._cache.used_bytes
        used = self._cache.observe(self._read_s, cache.refault_bytes, cache.file_bytes)
        if used and not was:
            log.info("%s of page cache count as used: they are read again", format_size_short(used))

    def nudge(self) -> None:
        """Reads the figures now: something hints at a shortage, or the next free slab is wanted.

        One reading is enough: how much memory is left says when the next one is due. A job that
        pages at its own limit makes the kernel hint every two seconds, on a host that has plenty.
        """
        self._wake.set()

    async def run(self) -> None:
        """Ticks until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self.tick()
                except InfiniswapError as error:
                    # Without figures the pool keeps its size; growing blindly could hurt the host.
                    self.counters["harvest_errors"] += 1
                    if not self._blind:
                        log.error(
                            "memory cannot be harvested: %s",
                            error,
                            extra=events.about(events.MEMORY_UNREADABLE),
                        )
                    self._blind = True
                else:
                    if self._blind:
                        log.info("memory can be harvested again")
                    self._blind = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._wake.wait()
        finally:
            await self._end_tasks()

    def _pause_s(self) -> float:
        pause_s = sample_s(self._sampling, self.policy.slack_bytes, self.pool.state().total)
        # A whole part of the period, so that some ticks come with those of the other loops.
        part_s = self._period_s / math.ceil(self._period_s / pause_s)
        return min(pause_s, tick_pause_s(asyncio.get_running_loop().time(), part_s))

    async def tick(self) -> None:
        """One round: reads the figures, gives slabs back, starts slower work beside the ticks."""
        await self.refresh(0.0)
        released, before_bytes = 0, self.figures.available_bytes
        while (plan := self.policy.plan(self.pool.state())).release and await self.pool.release():
            released += 1
            await self.refresh(0.0)
        if released:
            log.info(
                "gave %s (%s) back to this host: available %s, was %s",
                counted(released, "slab"),
                format_size_short(released * self.policy.config.slab_bytes),
                format_size_short(self.figures.available_bytes),
                format_size_short(before_bytes),
            )
        if not plan.broken:
            self.broken_since_s = None
        elif self.broken_since_s is None:
            self.broken_since_s = self._clock()
        if plan.evict:
            self._begin_eviction(plan.evict, plan.urgent)
        elif (
            not plan.release
            and self._upkeep is None
            and not self.is_held  # making and zeroing slabs takes memory bandwidth
            and (plan.grow or self.pool.state().dirty)
        ):
            self._upkeep = asyncio.create_task(self._keep_up(), name="upkeep")
        self._report(plan.evict)
        self.pool.tell_unpinned()

    # ----------------------------------------------------------- beside the ticks

    @property
    def _has_leisure(self) -> bool:
        return not self.is_short and not self.is_held

    async def _keep_up(self) -> None:
        """Zeroes what came back, then makes slabs, as long as there is memory for them."""
        try:
            spare = self._background
            while self.pool.state().dirty and self._has_leisure and await self.pool.scrub(spare):
                pass
            while self._has_leisure and self.policy.plan(self.pool.state()).grow:
                if not await self.pool.grow(spare):
                    break
                await self.refresh(0.0)
        except InfiniswapError as error:
            log.debug("upkeep: %s", error)  # the next tick meets the same error, and says it
        finally:
            self._upkeep = None

    def _begin_eviction(self, count: int, urgent: bool) -> None:
        if self.evict is None:
            return
        if (batch := self._batches.begin(count, urgent, self._clock())) is None:
            return
        task = asyncio.create_task(self._run_eviction(self.evict, batch), name="eviction")
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _run_eviction(self, evict: Evict, batch: Batch) -> None:
        brought = 0
        try:
            brought = await evict(batch.count, batch.urgent)
        except InfiniswapError as error:
            log.error("eviction: %s", error)
        finally:
            self._batches.end(batch, brought, self._clock())
            self._wake.set()  # what came back is given to the host at once

    async def _end_tasks(self) -> None:
        tasks = {*self._evictions, *([self._upkeep] if self._upkeep else ())}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def prepare(self) -> bool:
        """Makes one more slab free, for a consumer that waits; False when there is no memory."""
        await self.refresh()
        if self.pool.state().free:
            return True
        if self.policy.plan(self.pool.state()).release:
            return False  # the host needs what there is
        if self.pool.state().dirty and await self.pool.scrub():
            return True
        return self.pool.mappable() > 0 and await self.pool.grow()

    def _report(self, evict: int) -> None:
        """Says once when the host gets short of memory, and when that is over."""
        if evict and not self.is_short:
            self.counters["shortages"] += 1
            log.warning(
                "this host is short of memory and takes %s back (available %s, headroom %s)",
                counted(evict, "lent slab"),
                format_size_short(self.figures.available_bytes),
                format_size_short(self.policy.config.headroom_bytes),
                extra=events.about(events.MEMORY_SHORT),
            )
        elif self.is_short and not evict:
            log.info("this host has its headroom again", extra=events.about(events.MEMORY_BACK))
        self.is_short = bool(evict)
