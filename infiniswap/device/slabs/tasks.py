# SPDX-License-Identifier: Apache-2.0
"""Tasks that end with the mapper."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Tasks:
    """Background work, for which no caller waits. Everything runs on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, ResultT], name: str) -> asyncio.Task[ResultT]:
        """Starts a task that goes on until it is done or `close`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends them all. Others may be started afterwards."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
