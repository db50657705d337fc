# SPDX-License-Identifier: Apache-2.0
"""When loops that look at something once a period wake up: all of them at the same moments.

To wake up costs an idle process more than what it then does, because the processor sleeps and the
caches are cold. Loops whose ticks come together cost one wake-up.
"""

from __future__ import annotations

import asyncio
import math


def loop_now_s() -> float:
    """The clock of the event loop that runs."""
    return asyncio.get_running_loop().time()


def tick_pause_s(now_s: float, period_s: float) -> float:
    """Seconds until the clock next shows a whole multiple of the period, at least half a period.

    So a tick that comes late, because its process was stopped, is not followed by another at once.
    """
    return (math.floor(now_s / period_s + 0.5) + 1.0) * period_s - now_s


async def next_tick(period_s: float) -> None:
    """Sleeps until the next tick of this event loop."""
    await asyncio.sleep(tick_pause_s(loop_now_s(), period_s))
