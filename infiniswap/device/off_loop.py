# SPDX-License-Identifier: Apache-2.0
"""Waiting on the event loop for what does not end with the one who waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, call: Callable[[], T]) -> T:
    """What `call` returns or raises. It has ended when this has, cancelled or not."""
    # Nobody must find a remote that is half connected.
    return await to_end(asyncio.get_running_loop().run_in_executor(executor, call))


async def to_end(work: asyncio.Future[T]) -> T:
    """What `work`, which is bounded, returns or raises. It has ended when this has."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # It goes on all the same, and is waited for, however often we are told to end.
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        work.exception()  # seen: otherwise it is logged
        raise


async def while_going_on(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, Any]) -> T | None:
    """What `work` returns or raises; None when `end` comes first. Neither goes on afterwards."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.wait({working, ending})
