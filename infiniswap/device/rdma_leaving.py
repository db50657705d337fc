# SPDX-License-Identifier: Apache-2.0
"""RDMA devices that this host removes: a kernel may wait until a device's process has let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

_LOOK_S = 1.0

T = TypeVar("T")


class Blocking(Protocol):
    """Runs a call outside of the event loop."""

    def __call__(self, call: Callable[[], T]) -> Awaitable[T]: ...


class Engine(Protocol):
    """What uses them."""

    def rdma_let_go(self) -> int:
        """See infiniswap.engine.protocol."""


async def let_go(
    engine: Engine,
    blocking: Blocking,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Ends connections by such devices, as long as the device serves; links go on over TCP."""
    while True:
        await sleep(_LOOK_S)
        try:
            if await blocking(engine.rdma_let_go):
                log.warning("an RDMA device is being removed: its connections are ended")
        except Exception:
            log.exception("whether an RDMA device is being removed cannot be seen")
