# SPDX-License-Identifier: Apache-2.0
"""Tells the engine when this host's processors are full.

Reads of a donor then take long for want of processor time. The engine must not take that for a slow
link and read from the disk instead, which needs the same processors (docs/adr/0036).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from infiniswap.engine.protocol import Engine
from infiniswap.system.pressure import processor_stalls

PERIOD_S = 2.0
"""The kernel adds up its figures once in two seconds."""

FULL = 0.5
"""Processors are full when some task waited for one in this part of the time. With one job and its
device on two processors it is below 0.3 while they wait for a slow link, and above 0.9 when they
need more processor time than there is."""


async def watch_processors(
    engine: Engine,
    *,
    stalls: Callable[[], Mapping[str, float]] = processor_stalls,
    clock: Callable[[], float] = time.monotonic,
    period_s: float = PERIOD_S,
) -> None:
    """Until cancelled, or at once where the kernel does not tell how long tasks wait.

    Args:
        engine: is told of each change.
        stalls: for how many seconds since the boot some task has waited, by "some".
        clock: seconds.
        period_s: between two looks.
    """
    was_full = False
    before_s = clock()
    waited_s = stalls().get("some")
    while waited_s is not None:
        await asyncio.sleep(period_s)
        now_s = clock()
        now_waited_s = stalls().get("some")
        if now_waited_s is None:
            break
        is_full = now_waited_s - waited_s >= FULL * (now_s - before_s)
        if is_full != was_full:
            engine.processors_full(is_full)
            was_full = is_full
        before_s, waited_s = now_s, now_waited_s
    if was_full:
        engine.processors_full(False)
