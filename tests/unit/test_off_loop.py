# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.off_loop: a blocking call has ended when its caller goes on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infiniswap.device.off_loop import run_to_end
from infiniswap.errors import EngineError


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_running_call_outlasts_every_cancellation_of_its_caller(
    fails: bool, cancels: int
) -> None:
    going_on, ended = threading.Event(), threading.Event()

    def reconnect() -> None:
        going_on.wait(30)
        ended.set()
        if fails:
            raise EngineError("no", code=5)

    with ThreadPoolExecutor(1) as executor:
        caller = asyncio.create_task(run_to_end(executor, reconnect))
        for _ in range(cancels):
            await asyncio.sleep(0.02)
            caller.cancel()
        assert not ended.is_set()
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        # Whoever gives the donor up, or undoes a start, now finds the engine at rest.
        assert ended.is_set()
