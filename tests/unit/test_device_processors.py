# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.process.processors: the engine hears of each change, and of nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from support.machine.virtual_time import in_virtual_time

from infiniswap.device.process.processors import PERIOD_S, are_full, watch_processors
from infiniswap.system.scheduling import ThreadTime, between, thread_times

FULL, FREE = ThreadTime(10, 11), ThreadTime(10, 10)


class Device:
    """An engine that moves pages in those periods for which there are times; one thread.

    Attributes:
        told: whether processors are full, as the engine heard it.
        looks: how often the kernel was asked.
    """

    def __init__(self, periods: Sequence[ThreadTime | None], *, tells: bool = True) -> None:
        self._periods = list(periods)
        self._tells = tells
        self._now = ThreadTime(1000, 5000)
        self._moved = 0
        self.told: list[bool] = []
        self.looks = 0

    def pages_moved(self) -> tuple[int, int]:
        return self._moved, 0

    def processors_full(self, is_full: bool) -> None:
        self.told.append(is_full)

    def look(self) -> dict[int, ThreadTime]:
        self.looks += 1
        return {7: self._now} if self._tells else {}

    async def serve(self) -> None:
        for times in self._periods:
            if times is not None:
                self._moved += 1
                self._now = ThreadTime(
                    self._now.ran_ns + times.ran_ns, self._now.waited_ns + times.waited_ns
                )
            await asyncio.sleep(PERIOD_S)


async def watched(device: Device) -> Device:
    task = asyncio.create_task(watch_processors(cast(Any, device), device.look))
    await asyncio.sleep(PERIOD_S / 2)
    await device.serve()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    return device


@in_virtual_time
async def test_the_engine_is_told_of_changes_only() -> None:
    device = await watched(Device([FREE, FREE, FULL, FULL, FREE, FREE, FULL, FREE]))
    assert device.told == [True, False, True, False]


@in_virtual_time
async def test_a_device_that_is_not_used_does_not_look() -> None:
    device = await watched(Device([FREE, FULL, None, None, None, FULL, FULL]))
    # After a rest the first period has nothing to be compared with.
    assert device.told == [True, False, True]
    assert device.looks == 4


@in_virtual_time
async def test_where_the_kernel_does_not_tell_processors_have_time() -> None:
    assert (await watched(Device([FULL] * 5, tells=False))).told == []


def test_threads_that_came_count_and_those_that_ended_do_not() -> None:
    before = {1: ThreadTime(100, 50), 2: ThreadTime(10**9, 10**9)}
    now = {1: ThreadTime(130, 60), 3: ThreadTime(5, 40)}
    assert between(before, now) == ThreadTime(35, 50)
    assert are_full(between(before, now))


@pytest.mark.parametrize("text", ["", "junk", "12 x 3", "7"])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, text: str) -> None:
    task = tmp_path / "self" / "task"
    assert thread_times(proc=tmp_path) == {}
    for thread, content in (("11", "12 34 5\n"), ("12", text)):
        (task / thread).mkdir(parents=True)
        (task / thread / "schedstat").write_text(content)
    (task / "13").mkdir()
    assert thread_times(proc=tmp_path) == {11: ThreadTime(12, 34)}


def test_this_kernel_tells_what_a_thread_has_run() -> None:
    before = thread_times()
    found = {}

    def work() -> None:
        sum(range(1_000_000))
        found.update(thread_times())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    assert thread.native_id not in before
    assert found[thread.native_id].ran_ns > 0
