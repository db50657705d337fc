# SPDX-License-Identifier: Apache-2.0
"""Waits on the event loop for work that goes on when the waiting task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, call: Callable[[], T]) -> T:
    """Runs a blocking call in `executor` and returns what it returns, or raises what it raises.

    The call cannot be stopped. A caller that is cancelled, however often, waits for its end first,
    so that nobody finds a remote that is half connected.
    """
    return await to_end(asyncio.get_running_loop().run_in_executor(executor, call))


async def to_end(work: asyncio.Future[T]) -> T:
    """Waits for bounded `work` as run_to_end does."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        work.exception()  # retrieved: asyncio logs an exception that nobody has asked for
        raise


async def while_going_on(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, Any]) -> T | None:
    """Returns what `work` returns, or None when `end` comes first. Neither goes on afterwards."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.wait({working, ending})
