# SPDX-License-Identifier: Apache-2.0
"""The way back to RDMA, where pages go over TCP because RDMA could not be.

Looked for beside the service and ever more rarely. Only when a page has come over RDMA are the
connections exchanged, and slabs suspended for that moment, as when a session is recovered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from infiniswap.device.donors.transport import Wire

log = logging.getLogger(__name__)

_PAUSE_S_FIRST = 2.0
_PAUSE_S_MAX = 60.0


class RdmaReturn:
    """Looks for RDMA to one donor. Everything on the event loop.

    Args:
        wire: what is in use, and what is wished for.
        probe: whether RDMA works now. Cancelled when something more urgent comes.
        switch: makes new connections; they are RDMA's when it still works.
        sleep: asyncio.sleep, or a test's.
    """

    def __init__(
        self,
        wire: Wire,
        probe: Callable[[], Coroutine[Any, Any, bool]],
        switch: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._wire = wire
        self._probe = probe
        self._switch = switch
        self._sleep = sleep
        self._tasks: set[asyncio.Task[None]] = set()  # the search, and those that just end
        self._probing: asyncio.Task[bool] | None = None
        self._pause_s = _PAUSE_S_FIRST
        self._has_switched = False

    def connected(self) -> None:
        """There are new connections; of which kind, the wire says."""
        # Our own, that were TCP's again, are no new beginning: each suspends slabs.
        if not (self._has_switched and self._wire.misses_rdma):
            self._pause_s = _PAUSE_S_FIRST
        self._has_switched = False
        for task in self._tasks:
            task.cancel()
        if self._wire.misses_rdma:
            task = asyncio.create_task(self._run(), name=f"RDMA to {self._wire.address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def interrupt(self) -> None:
        """A probe that is under way gives way; the next comes in its time."""
        if self._probing is not None:
            self._probing.cancel()

    async def close(self) -> None:
        """Looks no more. Idempotent."""
        self.interrupt()
        if tasks := set(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while self._wire.misses_rdma:
            await self._sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, _PAUSE_S_MAX)
            if self._wire.misses_rdma and await self._ask():
                log.info("donor %s: RDMA works again", self._wire.address)
                self._has_switched = True
                self._switch()

    async def _ask(self) -> bool:
        probing = self._probing = asyncio.create_task(self._probe(), name="probe of RDMA")
        try:
            await asyncio.wait({probing})
        finally:
            self._probing = None
            probing.cancel()  # when we are told to end
            await asyncio.wait({probing})
        return not probing.cancelled() and probing.result()
