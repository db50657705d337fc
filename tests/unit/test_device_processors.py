# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.process.processors: the engine hears of each change, and of nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from support.machine.virtual_time import in_virtual_time

from infiniswap.device.process.processors import FULL, PERIOD_S, watch_processors
from infiniswap.system.pressure import processor_stalls


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def processors_full(self, is_full: bool) -> None:
        self.told.append(is_full)


def stalls(*shares: float) -> Iterator[dict[str, float]]:
    """What the kernel says at each look, after these shares of a period; then it says nothing."""
    waited_s = 1000.0
    yield {"some": waited_s, "full": 0.0}
    for share in shares:
        waited_s += share * PERIOD_S
        yield {"some": waited_s, "full": 0.0}
    yield {}


async def watch(*shares: float) -> tuple[list[bool], int]:
    """What the engine is told, and how many periods the loop has run."""
    engine, looks = Engine(), stalls(*shares)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await watch_processors(cast(Any, engine), stalls=lambda: next(looks), clock=loop.time)
    return engine.told, round((loop.time() - began_s) / PERIOD_S)


@in_virtual_time
async def test_the_engine_is_told_of_changes_only() -> None:
    less = FULL / 2
    told, periods = await watch(0.0, less, 1.0, FULL, less, less, 1.0, 0.0, 0.0)
    assert told == [True, False, True, False]
    assert periods == 10


@in_virtual_time
async def test_without_figures_processors_have_time() -> None:
    assert await watch(1.0, 1.0) == ([True, False], 3)
    assert await watch(0.0) == ([], 2)


@in_virtual_time
async def test_a_kernel_that_does_not_tell_costs_nothing() -> None:
    engine = Engine()
    await watch_processors(cast(Any, engine), stalls=dict)
    assert engine.told == []


@in_virtual_time
async def test_it_ends_with_the_device() -> None:
    engine = Engine()
    task = asyncio.create_task(watch_processors(cast(Any, engine), stalls=lambda: {"some": 1.0}))
    await asyncio.sleep(100 * PERIOD_S)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert engine.told == []


def test_the_kernels_figures_are_of_processors(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text("some avg10=0.00 total=7\n")
    assert processor_stalls(proc=tmp_path) == {}
    (tmp_path / "pressure" / "cpu").write_text("some avg10=1.00 total=3000000\n")
    assert processor_stalls(proc=tmp_path) == {"some": 3.0}
