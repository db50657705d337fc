# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.links: what a recovery that runs out of time leaves behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from infiniswap.device.links import DonorLink
from infiniswap.errors import EngineError
from infiniswap.units import HostPort


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_call_into_the_engine_is_waited_for(fails: bool) -> None:
    going_on, ended = threading.Event(), threading.Event()

    def reconnect() -> None:
        going_on.wait(30)
        ended.set()
        if fails:
            raise EngineError("no", code=5)

    nothing = cast(Any, None)
    with ThreadPoolExecutor(1) as executor:
        link = DonorLink(HostPort("127.0.0.1", 1), nothing, nothing, nothing, executor)
        asyncio.get_running_loop().call_later(0.2, going_on.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link._blocking(reconnect), 0.05)
        # Whoever gives the donor up now finds the engine at rest.
        assert ended.is_set()
