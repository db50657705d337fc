# SPDX-License-Identifier: Apache-2.0
"""The way back to a better transport, while pages go by another one.

The device probes in the background, ever more rarely. Only when a page has come by the better
transport are the connections exchanged, and the slabs suspended for that moment, as in a recovery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from infiniswap.device.donors.transports.choice import TransportChoice

log = logging.getLogger(__name__)

_PAUSE_S_FIRST = 2.0
_PAUSE_S_MAX = 60.0


class TransportSearch:
    """Looks for a better transport to one donor. Everything on the event loop.

    Args:
        choice: what is in use, and what would be better.
        probe: tells whether a better one works now. Cancelled when something more urgent comes.
        switch: makes new connections, by the better transport if it still works.
        sleep: asyncio.sleep, or a test's.
    """

    def __init__(
        self,
        choice: TransportChoice,
        probe: Callable[[], Coroutine[Any, Any, bool]],
        switch: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._choice = choice
        self._probe = probe
        self._switch = switch
        self._sleep = sleep
        self._tasks: set[asyncio.Task[None]] = set()  # the search, and those that are just ending
        self._probing: asyncio.Task[bool] | None = None
        self._pause_s = _PAUSE_S_FIRST
        self._has_switched = False

    def connected(self) -> None:
        """New connections have been made, by the transport that the choice names."""
        # A switch that led to the old transport is no new beginning: each one suspends slabs.
        if not (self._has_switched and self._choice.misses_better):
            self._pause_s = _PAUSE_S_FIRST
        self._has_switched = False
        for task in self._tasks:
            task.cancel()
        if self._choice.misses_better:
            name = f"better transport to {self._choice.address}"
            task = asyncio.create_task(self._run(), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def interrupt(self) -> None:
        """Cancels a probe that is under way; the next one comes in its time."""
        if self._probing is not None:
            self._probing.cancel()

    async def close(self) -> None:
        """Ends the search. Idempotent."""
        self.interrupt()
        if tasks := set(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while self._choice.misses_better:
            await self._sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, _PAUSE_S_MAX)
            if self._choice.misses_better and await self._ask():
                log.info("donor %s: %s works again", self._choice.address, self._choice.best.label)
                self._has_switched = True
                self._switch()

    async def _ask(self) -> bool:
        probing = self._probing = asyncio.create_task(self._probe(), name="probe of a transport")
        try:
            await asyncio.wait({probing})
        finally:
            self._probing = None
            probing.cancel()  # when this task was cancelled
            await asyncio.wait({probing})
        return not probing.cancelled() and probing.result()
