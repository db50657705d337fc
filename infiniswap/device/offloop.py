# SPDX-License-Identifier: Apache-2.0
"""Blocking calls of the engine, from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, call: Callable[[], T]) -> T:
    """What `call` returns or raises. It has ended when this has, cancelled or not."""
    work = asyncio.get_running_loop().run_in_executor(executor, call)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # It goes on all the same, and nobody must find a remote that is half connected: it is
        # waited for, however often we are told to end. It is bounded.
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        work.exception()  # seen: otherwise it is logged
        raise
