# SPDX-License-Identifier: Apache-2.0
"""The slab pool: slabs are made, zeroed and given back to the host, one call at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from infiniswap import events
from infiniswap.engine.store import Store
from infiniswap.errors import EngineError, InfiniswapError
from infiniswap.policy.headroom import HeadroomPolicy, PoolState
from infiniswap.units import counted

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_RETRY_S: Final = 10.0
"""After the host refused memory for a slab."""


class SlabPool:
    """Slabs of the store, as many as the policy allows.

    Args:
        store: where they are.
        policy: limits.
        executor: a few threads for blocking calls.
        clock: seconds, monotonic.
        counters: slabs_allocated, slabs_refused, slabs_released.
    """

    def __init__(
        self,
        store: Store,
        policy: HeadroomPolicy,
        executor: Executor,
        clock: Callable[[], float],
        counters: Counter[str],
    ) -> None:
        self._store = store
        self._policy = policy
        self._executor = executor
        self._clock = clock
        self._counters = counters
        self._lock = asyncio.Lock()  # one slab made or zeroed at a time
        self._refused_until_s = float("-inf")
        self._unpinned_told = False
        self._is_pinning = False

    @property
    def is_refused(self) -> bool:
        """Whether the host has just refused memory for a slab."""
        return self._clock() < self._refused_until_s

    def state(self) -> PoolState:
        """What the pool holds now."""
        stats = self._store.stats()
        return PoolState(stats["slabs_free"], stats["slabs_dirty"], stats["slabs_mapped"])

    def mappable(self) -> int:
        """Slabs that could be mapped now, those still to be allocated included."""
        pool = self.state()
        return pool.free if self.is_refused else self._policy.slabs_mappable(pool)

    async def release(self) -> bool:
        """Gives a free slab back to the host; False: there was none."""
        # Not under the lock: a thread that makes or zeroes a slab holds it for half a second.
        done = await self._off_loop(self._store.release_free)
        self._counters["slabs_released"] += done
        return done

    async def scrub(self, executor: Executor | None = None) -> bool:
        """Zeroes a slab that came back; False: there was none."""
        async with self._lock:
            return await self._off_loop(self._store.scrub, executor)

    async def grow(self, executor: Executor | None = None) -> bool:
        """Makes a slab; False: there is no memory for it."""
        async with self._lock:
            if self.mappable() <= self.state().free:
                return False
            try:
                await self._off_loop(self._store.preallocate, executor)
            except EngineError as error:
                self._refused_until_s = self._clock() + _RETRY_S
                self._counters["slabs_refused"] += 1
                log.warning(
                    "this host gives no memory for another slab: %s",
                    error,
                    extra=events.about(events.SLABS_REFUSED),
                )
                return False
        self._counters["slabs_allocated"] += 1
        return True

    async def pin_found(self, background: Executor) -> None:
        """Pins the slabs of a predecessor while they are served already: consumers wait."""
        self._is_pinning = True
        try:
            while await self._off_loop(self._store.pin, background):
                pass
        except InfiniswapError as error:
            log.warning("%s", error)
        finally:
            self._is_pinning = False

    def tell_unpinned(self) -> None:
        """Says once when slabs are not pinned."""
        unpinned = self._store.stats()["slabs_unpinned"]
        if unpinned and not self._unpinned_told and not self._is_pinning:
            self._unpinned_told = True
            log.warning(
                "not pinned: %s, which this host may swap out. "
                "Raise the locked-memory limit (ulimit -l, LimitMEMLOCK=infinity)",
                counted(unpinned, "slab"),
                extra=events.about(events.SLABS_UNPINNED),
            )

    async def _off_loop(
        self, call: Callable[[], ResultT], executor: Executor | None = None
    ) -> ResultT:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(executor or self._executor, call)
