# SPDX-License-Identifier: Apache-2.0
"""Runs work on leases: one piece after the other for each lease, each piece to its end.

A map that follows an unmap of the same lease sees its result. What has begun is finished even when
the session that asked for it is gone, because the store and the lease table must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from infiniswap.donor.leases import LeaseTable

FENCE_MS: Final = 5_000
"""How long fencing a slab or a lease waits for requests under way."""

ResultT = TypeVar("ResultT")


class LeaseWork:
    """The work that is under way.

    Args:
        table: leases.
        executor: for blocking calls.
    """

    def __init__(self, table: LeaseTable, executor: Executor) -> None:
        self._table = table
        self._executor = executor
        self._locks: dict[int, asyncio.Lock] = {}
        self._under_way: set[asyncio.Future[Any]] = set()

    def under_way(self) -> list[object]:
        """Work that has not ended, and leases with a lock, for tests that expect none."""
        return [*self._under_way, *self._locks]

    async def whole(self, work: Coroutine[Any, Any, ResultT], lease: int) -> ResultT:
        """Runs work under the lease's lock, to its end even when the caller is cancelled."""

        async def locked() -> ResultT:
            # No lock for a number without a lease: such locks would pile up.
            if self._table.get(lease) is None:
                return await work
            async with self._locks.setdefault(lease, asyncio.Lock()):
                return await work

        return await asyncio.shield(self.track(locked()))

    def track(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Future[ResultT]:
        """Starts work that `finish` waits for."""

        def done(_task: asyncio.Future[ResultT]) -> None:
            self._under_way.discard(task)
            if not task.cancelled():
                task.exception()  # seen: whoever asked may be gone

        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(done)
        return task

    def forget(self, lease: int) -> None:
        """The lease has ended."""
        self._locks.pop(lease, None)

    async def off_loop(self, call: Callable[[], ResultT]) -> ResultT:
        """Runs a blocking call in the executor."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def finish(self) -> None:
        """Waits for all work. Each piece is bounded in time."""
        while self._under_way:
            await asyncio.wait(self._under_way)
