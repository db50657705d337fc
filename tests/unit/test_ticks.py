# SPDX-License-Identifier: Apache-2.0
"""infiniswap.ticks: loops that share their wake-ups."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.virtual_time import in_virtual_time

from infiniswap.ticks import next_tick, tick_pause_s


@given(st.floats(0.0, 1e7), st.sampled_from([0.05, 0.3, 1.0, 2.0, 60.0]))
def test_a_tick_is_a_multiple_of_the_period_and_never_half_a_period_away(
    now_s: float, period_s: float
) -> None:
    pause_s = tick_pause_s(now_s, period_s)
    assert 0.5 - 1e-6 <= pause_s / period_s <= 1.5 + 1e-6
    periods = (now_s + pause_s) / period_s
    assert periods == pytest.approx(round(periods), abs=1e-6)


@in_virtual_time
async def test_loops_that_began_at_any_time_wake_up_together() -> None:
    times: set[float] = set()

    async def run(period_s: float) -> None:
        while True:
            await next_tick(period_s)
            times.add(round(asyncio.get_running_loop().time(), 6))

    tasks = []
    for number in range(5):
        await asyncio.sleep(0.37)
        period_s = 2.0 if number == 4 else 1.0
        tasks.append(asyncio.create_task(run(period_s), name=f"loop {number}"))
    times.clear()
    await asyncio.sleep(60.0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(times) == 60
