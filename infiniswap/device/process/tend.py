# SPDX-License-Identifier: Apache-2.0
"""Another key for further pages, in time."""

from __future__ import annotations

import asyncio
import logging
from errno import ENOSPC

from infiniswap import events
from infiniswap.device.spec.device_key import DeviceKey
from infiniswap.engine.protocol import Engine
from infiniswap.errors import EngineError

log = logging.getLogger(__name__)

TEND_S = 60.0
"""A key is good for 2^32 pages and much more than that: minutes make no difference."""


async def tend_key(engine: Engine, key: DeviceKey) -> None:
    """Until cancelled: lets the engine go on with another key when the present one was used enough.

    Args:
        engine: seals pages.
        key: notes where there is no room for another one.
    """
    told = False
    while True:
        await asyncio.sleep(TEND_S)
        try:
            if engine.seal_tend():
                log.info("further pages are sealed with another key")
            key.tended(is_used_up=False)
            told = False
        except EngineError as error:
            key.tended(is_used_up=error.code == ENOSPC)
            if not told:
                about = events.about(events.KEYS_USED_UP) if error.code == ENOSPC else None
                log.warning("%s", error, extra=about)
                told = True
