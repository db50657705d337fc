# SPDX-License-Identifier: Apache-2.0
"""RDMA devices that this host removes: a kernel may wait until a device's process has let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from infiniswap import events
from infiniswap.engine.protocol import Engine, OffLoop

log = logging.getLogger(__name__)

_LOOK_S = 1.0


async def let_go(
    engine: Engine,
    blocking: OffLoop,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Ends connections by such devices, as long as the device serves; links go on over TCP."""
    while True:
        await sleep(_LOOK_S)
        try:
            if await blocking(engine.rdma_let_go):
                log.warning(
                    "an RDMA device is being removed: its connections are ended",
                    extra=events.about(events.RDMA_REMOVED),
                )
        except Exception:
            log.exception("whether an RDMA device is being removed cannot be seen")
