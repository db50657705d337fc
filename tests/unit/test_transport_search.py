# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.transports.search: a better transport is looked for ever more rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from infiniswap.device.donors.transports.search import TransportSearch


class World:
    """A transport choice over TCP; time stands still until `passes`."""

    address = "donor:1"
    best = SimpleNamespace(label="RDMA")
    misses_better = True
    switch_gives = "rdma"

    def __init__(self) -> None:
        self.answers: list[bool] = []
        self.pauses: list[float] = []
        self.switched = 0
        self.hangs = False
        self.began = asyncio.Event()
        self.stirred = asyncio.Event()
        self._time = asyncio.Semaphore(0)
        self.subject = TransportSearch(cast(Any, self), self.probe, self.switch, self.sleep)

    async def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.stirred.set()
        await self._time.acquire()

    def passes(self) -> None:
        self._time.release()

    async def probe(self) -> bool:
        self.began.set()
        if self.hangs:
            await asyncio.Event().wait()
        return self.answers.pop(0)

    def switch(self) -> None:
        self.switched += 1
        self.stirred.set()
        self.misses_better = self.switch_gives == "tcp"

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not what():
                self.stirred.clear()
                await self.stirred.wait()

    async def until_pauses(self, count: int) -> None:
        await self.until(lambda: len(self.pauses) >= count)


async def test_it_is_looked_for_ever_more_rarely_until_it_is_there() -> None:
    world = World()
    world.answers = [False] * 7 + [True]
    world.subject.connected()
    world.subject.connected()  # one search is enough
    for number in range(1, 9):
        await world.until_pauses(number)
        world.passes()
    await world.until(lambda: world.switched > 0)
    assert world.pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    assert world.switched == 1
    # With RDMA nobody looks for it; lost once more, the search begins again.
    world.subject.connected()
    await asyncio.sleep(0)
    assert len(world.pauses) == 8
    world.misses_better = True
    world.subject.connected()
    await world.until_pauses(9)
    assert world.pauses[8] == 2
    await world.subject.close()


async def test_new_connections_begin_a_new_search() -> None:
    world = World()
    world.answers = [False] * 2 + [True] + [False] * 9
    world.switch_gives = "tcp"
    world.subject.connected()
    for number in range(1, 4):
        await world.until_pauses(number)
        world.passes()
    await world.until(lambda: world.switched > 0)
    # Exchanged for TCP's again: that is not tried at once.
    world.subject.connected()
    await world.until_pauses(len(world.pauses) + 1)
    assert world.pauses[-1] == 16
    # Lost, or another lease's.
    world.subject.connected()
    await world.until_pauses(len(world.pauses) + 1)
    assert world.pauses[-1] == 2
    # RDMA's in time, and lost once more, before the search that is under way has looked.
    world.misses_better = False
    world.subject.connected()
    world.misses_better = True
    world.subject.connected()
    await world.until_pauses(len(world.pauses) + 1)
    assert world.pauses[-1] == 2
    await world.subject.close()


async def test_a_probe_gives_way_to_a_recovery() -> None:
    world = World()
    world.hangs = True
    world.subject.interrupt()  # nothing is under way
    world.subject.connected()
    await world.until_pauses(1)
    world.passes()
    await world.began.wait()
    world.subject.interrupt()
    await world.until_pauses(2)
    assert world.switched == 0
    # And to the end.
    world.began.clear()
    world.passes()
    await world.began.wait()
    await world.subject.close()
    await world.subject.close()
    assert world.switched == 0
