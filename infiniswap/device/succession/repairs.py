# SPDX-License-Identifier: Apache-2.0
"""Mends what ends of a device's front end while its process serves: connections of the kernel's are
replaced; where all of it has ended, the process gives way to the standby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Protocol

from infiniswap import events
from infiniswap.device.frontends import KernelDevice
from infiniswap.device.succession.holder import Holder
from infiniswap.engine.protocol import OffLoop
from infiniswap.errors import InfiniswapError

log = logging.getLogger(__name__)

FRONT_END = "frontend"
"""Name of the alarm of a front end that has ended by itself."""

_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 60.0
_STEADY_S = 5.0


class Reports(Protocol):
    """What the engine has reported (EngineEvents)."""

    on_connection_lost: Callable[[], None]

    @property
    def alarms(self) -> MutableMapping[str, str]:
        """Of the device, by name."""


class Repairs:
    """Runs on the event loop, as long as the device serves.

    Args:
        kernel: the device's.
        holder: who knows whether a standby is ready, and gives it its turn.
        reports: calls `needed` from now on.
        blocking: for what blocks.
        steady_s: a front end that ends sooner after the start of this has ended for a reason that a
            successor may meet, too: so long they follow each other at the least.
    """

    def __init__(
        self,
        kernel: KernelDevice,
        holder: Holder,
        reports: Reports,
        blocking: OffLoop,
        *,
        steady_s: float = _STEADY_S,
    ) -> None:
        self._kernel = kernel
        self._holder = holder
        self._blocking = blocking
        self._alarms = reports.alarms
        self._steady_from_s = asyncio.get_running_loop().time() + steady_s
        self._lost = asyncio.Event()
        self._lost.set()  # one may be lost already
        reports.on_connection_lost = self.needed
        holder.on_standby = self.needed

    def needed(self) -> None:
        """A connection is lost, or the front end has ended, or events were lost; or a standby that
        was waited for is ready."""
        self._lost.set()

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = _PAUSE_S_MIN
        while True:
            await self._lost.wait()
            self._lost.clear()
            if FRONT_END in self._alarms:
                await self._give_way()
                continue
            try:
                await self._blocking(self._kernel.repair)
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

    async def _give_way(self) -> None:
        """Ends this process, which can serve nothing any more, if another one could."""
        await asyncio.sleep(self._steady_from_s - asyncio.get_running_loop().time())
        if self._holder.standby != "ready":
            return  # once more when there is one
        try:
            is_left = await self._blocking(self._kernel.is_left)
        except InfiniswapError as error:
            log.error("whether the standby could take over cannot be seen: %s", error)
            await asyncio.sleep(_PAUSE_S_MIN)
            self._lost.set()
            return
        if not is_left:
            return  # nobody could
        log.error("as its front end has ended, this process ends now: its standby takes over")
        self._holder.yield_now()
