# SPDX-License-Identifier: Apache-2.0
"""Mends the kernel's connections to a device's front end, for as long as the device serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping

from infiniswap import events
from infiniswap.errors import InfiniswapError

log = logging.getLogger(__name__)

_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 60.0


class Repairs:
    """Runs on the event loop.

    Args:
        repair: blocks; mends what can be mended.
        blocking: runs it elsewhere.
        alarms: of the device, by name.
    """

    def __init__(
        self,
        repair: Callable[[], None],
        blocking: Callable[[Callable[[], None]], Awaitable[None]],
        alarms: MutableMapping[str, str],
    ) -> None:
        self._repair = repair
        self._blocking = blocking
        self._alarms = alarms
        self._lost = asyncio.Event()
        self._lost.set()  # one may be lost already

    def needed(self) -> None:
        """A connection is lost, or events were."""
        self._lost.set()

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = _PAUSE_S_MIN
        while True:
            await self._lost.wait()
            self._lost.clear()
            try:
                await self._blocking(self._repair)
            except InfiniswapError as error:
                self._alarms["connections"] = f"the kernel's connections are not complete: {error}"
                log.error(
                    "%s", self._alarms["connections"], extra=events.about(events.CONNECTIONS_LOST)
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                self._lost.set()
                continue
            self._alarms.pop("connections", None)
            pause_s = _PAUSE_S_MIN
