# SPDX-License-Identifier: Apache-2.0
"""Tells the engine when this host's processors are full.

Reads of a donor then take long for want of processor time. The engine must not take that for a slow
link and read from the disk instead, which needs the same processors (docs/adr/0036).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from infiniswap.engine.protocol import Engine
from infiniswap.system.scheduling import ThreadTime, between, thread_times

PERIOD_S = 2.0
"""Between two looks: the choice is one of throughput, not of single pages."""


def are_full(times: ThreadTime) -> bool:
    """Whether a device's threads have waited longer for processors than they have run.

    One fault at a time over a slow link makes it a third of what they ran, 16 reads at a time on
    two processors twice as much (measured on Linux 6.18).
    """
    return times.waited_ns > times.ran_ns


async def watch_processors(
    engine: Engine, look: Callable[[], Mapping[int, ThreadTime]] = thread_times
) -> None:
    """Until cancelled. A device that is not used does not look.

    Args:
        engine: is told of each change.
        look: the times of this process's threads; empty: the kernel does not tell, and then
            processors have time.
    """
    was_full = False
    moved = engine.pages_moved()
    before: Mapping[int, ThreadTime] = {}
    while True:
        await asyncio.sleep(PERIOD_S)
        moved_before, moved = moved, engine.pages_moved()
        now = look() if moved != moved_before else {}
        is_full = bool(before) and are_full(between(before, now))
        if is_full != was_full:
            engine.processors_full(is_full)
            was_full = is_full
        before = now
