# SPDX-License-Identifier: Apache-2.0
"""Repairs a device's front end while its process serves: replaces the kernel's connections; when
the whole front end has ended, the process gives way to the standby."""

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
"""Name of the alarm: the front end has ended without being stopped."""

_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 60.0
_STEADY_S = 5.0


class Reports(Protocol):
    """The engine's reports (EngineEvents)."""

    on_connection_lost: Callable[[], None]

    @property
    def alarms(self) -> MutableMapping[str, str]:
        """Of the device, by name."""


class Repairs:
    """Runs on the event loop, as long as the device serves.

    Args:
        kernel: the device's.
        holder: knows whether a standby is ready, and gives it its turn.
        reports: calls `needed` from now on.
        blocking: runs what blocks.
        steady_s: least time between two processes that give way: whatever ends a front end sooner
            may end its successor's, too.
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
        """A connection is lost, the front end has ended, events were lost, or a standby is ready at
        last."""
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
        """Ends this process, which can serve nothing now, if another one could."""
        await asyncio.sleep(self._steady_from_s - asyncio.get_running_loop().time())
        if self._holder.standby != "ready":
            return  # called again when one is
        try:
            is_left = await self._blocking(self._kernel.is_left)
        except InfiniswapError as error:
            log.error("cannot find out whether the standby could take over: %s", error)
            await asyncio.sleep(_PAUSE_S_MIN)
            self._lost.set()
            return
        if not is_left:
            return  # no process could
        log.error("the front end has ended: this process ends, and its standby takes over")
        self._holder.yield_now()
