# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.evict: which slabs go, and what consumers may and may not do to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import pytest

from infiniswap.donor.evict import Evictor, MappedSlab
from infiniswap.errors import DeadlineError, EngineError, InfiniswapError, RequestRefusedError
from infiniswap.policy.eviction import EvictionConfig

Rates = Mapping[int, dict[int, float] | InfiniswapError]


class Owners:
    """Leases 1 and 2 with slots; `rates` is what their owners say, or why nothing."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.slabs = [(lease, slot) for lease in (1, 2) for slot in range(4)]
        self.kept: set[MappedSlab] = set()
        self.broken: set[MappedSlab] = set()
        self.taken: list[MappedSlab] = []
        self.asked: list[int] = []
        self.move_ms: list[int] = []
        self.hurry: dict[MappedSlab, asyncio.Future[None]] = {}

    def mapped(self) -> list[MappedSlab]:
        return list(self.slabs)

    async def all_move(self, count: int) -> None:
        while len(self.hurry) < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    async def activity(self, lease: int, wait_s: float) -> dict[int, float]:
        self.asked.append(lease)
        rates = self.rates[lease]
        if isinstance(rates, InfiniswapError):
            raise rates
        return rates

    async def evict(
        self, lease: int, slot: int, deadline_ms: int, move_ms: int = 0, *, last_copy: bool = False
    ) -> bool:
        self.move_ms.append(move_ms)
        if move_ms and (lease, slot) not in self.kept:
            await asyncio.wait({self.hurry.setdefault((lease, slot), asyncio.Future())})
        elif (lease, slot) in self.hurry:
            self.hurry[lease, slot].set_result(None)
        if (lease, slot) in self.broken:
            raise EngineError("no")
        if (lease, slot) in self.kept and not last_copy:
            return False
        if (lease, slot) in self.slabs:
            self.taken.append((lease, slot))
            self.slabs.remove((lease, slot))
        return True


def evictor(slabs: Owners, clock: Callable[[], float] = lambda: 0.0, **config: object) -> Evictor:
    settings = EvictionConfig(**config)  # type: ignore[arg-type]
    return Evictor(slabs, settings, Random(1), clock, Counter())


BUSY = dict.fromkeys(range(4), 500.0)
IDLE = dict.fromkeys(range(4), 1.0)


@pytest.mark.parametrize(
    ("rates", "gone"),
    [
        ({1: BUSY, 2: IDLE}, 2),
        # Who does not say counts as busiest.
        ({1: BUSY, 2: DeadlineError("no answer")}, 1),
        ({1: RequestRefusedError("no", reason="busy"), 2: BUSY}, 2),
    ],
)
async def test_the_least_active_of_those_asked_go(rates: Rates, gone: int) -> None:
    slabs = Owners(rates)
    assert await evictor(slabs).evict(4) == 4  # E' = E: all eight are asked for
    assert {lease for lease, _ in slabs.taken} == {gone}


async def test_a_batch_is_bounded_and_asks_no_more_than_e_and_e_prime() -> None:
    slabs = Owners({1: BUSY, 2: IDLE})
    assert await evictor(slabs, slabs_max=3, extra=0).evict(8) == len(slabs.taken) == 3


async def test_one_slab_alone_needs_no_question() -> None:
    slabs = Owners({1: BUSY, 2: IDLE})
    slabs.slabs = [(1, 0)]
    assert await evictor(slabs).evict(5) == 1
    assert slabs.asked == []
    assert await evictor(slabs).evict(5) == 0


async def test_a_slab_without_another_copy_is_left_alone_for_a_while() -> None:
    now_s = 0.0
    slabs = Owners({1: IDLE, 2: IDLE})
    slabs.kept = {(1, slot) for slot in range(4)}
    batches = evictor(slabs, lambda: now_s)
    assert await batches.evict(8) == 4
    assert await batches.evict(8) == 0
    slabs.kept = set()
    assert await batches.evict(8) == 0  # not asked again so soon
    now_s = 60.0
    assert await batches.evict(8) == 4


async def test_last_copies_go_only_when_nothing_else_is_lent() -> None:
    now_s = 5.0
    slabs = Owners({1: IDLE, 2: IDLE})
    slabs.kept = {(1, slot) for slot in range(4)}
    batches = evictor(slabs, lambda: now_s)
    assert await batches.evict(3, kept_since_s=5.0) == 0  # nobody has refused yet
    assert await batches.evict(8) == 4
    assert batches.is_kept((1, 0))
    now_s = 6.0
    assert await batches.evict(8, kept_since_s=5.5) == 0  # not since then
    slabs.slabs.append((2, 9))
    assert await batches.evict(8, kept_since_s=5.0) == 0  # there is another one
    assert await batches.evict(1) == 1
    assert await batches.evict(3, kept_since_s=5.0) == 3
    assert set(slabs.taken[-3:]) < slabs.kept


async def test_one_that_cannot_be_taken_does_not_stop_the_others() -> None:
    slabs = Owners({1: IDLE, 2: IDLE})
    slabs.broken = {(1, 0), (2, 3)}
    assert await evictor(slabs).evict(8) == 6


async def test_a_batch_in_a_hurry_takes_what_is_being_moved_first() -> None:
    slabs = Owners({1: IDLE, 2: BUSY})
    batches = evictor(slabs)
    gentle = asyncio.create_task(batches.evict(2, move_s=60.0))
    async with asyncio.timeout(30):
        await slabs.all_move(2)
        moving = set(slabs.hurry)
        # One is hurried; two, and another one, when three are needed.
        assert await batches.evict(1) == 1
        assert set(slabs.taken) <= moving
        assert await batches.evict(2) == 2
        assert await gentle == 2
    assert moving < set(slabs.taken)
    assert len(slabs.taken) == 3
    assert slabs.move_ms.count(60_000) == 2


async def test_what_is_being_moved_is_not_chosen_again() -> None:
    slabs = Owners({1: IDLE, 2: IDLE})
    batches = evictor(slabs, extra=8)
    first = asyncio.create_task(batches.evict(5, move_s=60.0))
    second = asyncio.create_task(batches.evict(5, move_s=60.0))
    async with asyncio.timeout(30):
        await slabs.all_move(8)
        assert await batches.evict(8) == 8
        assert (await first, await second) == (5, 3)


async def test_only_those_named_are_taken() -> None:
    slabs = Owners({1: IDLE, 2: IDLE})
    assert await evictor(slabs).evict(8, among=[(1, 2), (9, 9)]) == 1
    assert slabs.taken == [(1, 2)]
