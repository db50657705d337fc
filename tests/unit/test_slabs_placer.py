# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.placer: a donor for one slab."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest
from support.devices.slab_world import ObedientLink, SlabWorld, device
from support.machine.virtual_time import in_virtual_time

from infiniswap.device.slabs.placer import Purpose

pytestmark = pytest.mark.requires_native


@in_virtual_time
async def test_a_hundred_donors_cost_two_queries_a_slab() -> None:
    async with device(*[4] * 100, slabs=16) as (w, links):
        for slab in range(16):
            assert await w.mapper.placer.place(slab)
            assert sum(link.asked for link in links) == 2 * (slab + 1)


async def long_search(w: SlabWorld, links: list[ObedientLink], slab: int) -> asyncio.Task[bool]:
    """One that has begun, and whose donors take ten seconds to answer."""
    usual_s = links[0].answer_s
    for link in links:
        link.answer_s = 10.0
    search = asyncio.create_task(w.mapper.placer.place(slab))
    await asyncio.sleep(0.001)
    for link in links:
        link.answer_s = usual_s
    return search


@in_virtual_time
async def test_who_was_asked_in_vain_is_let_go_of_when_no_slab_is_left() -> None:
    async with device(*[16] * 4, slabs=16) as (w, links):
        assert await w.mapper.placer.place(0)
        await asyncio.sleep(0.1)
        assert [link.has_session for link in links] == [bool(link.mapped) for link in links]
        search = await long_search(w, links, 1)
        assert await w.mapper.placer.place(2)
        await asyncio.sleep(0.1)
        assert [link for link in links if link.has_session and not link.mapped]
        assert await search
        await asyncio.sleep(0.1)
        assert [link.has_session for link in links] == [bool(link.mapped) for link in links]
        assert sum(link.has_session for link in links) == 3


@in_virtual_time
async def test_a_donor_that_hangs_when_it_is_let_go_of_holds_up_no_search() -> None:
    async with device(*[4] * 3, slabs=16) as (w, links):
        for link in links:
            link.let_go = partial(asyncio.sleep, 5.0)  # type: ignore[method-assign]
        begun_s = asyncio.get_running_loop().time()
        for slab in range(8):
            assert await w.mapper.placer.place(slab)
        assert asyncio.get_running_loop().time() < begun_s + 5.0


@in_virtual_time
async def test_a_search_that_begins_meanwhile_keeps_what_has_not_been_let_go_of() -> None:
    async with device(*[4] * 8, slabs=16) as (w, links):
        gone: list[str] = []

        async def slow(link: ObedientLink) -> None:
            await asyncio.sleep(1.0)
            gone.append(str(link.address))

        for link in links:
            link.let_go = partial(slow, link)  # type: ignore[method-assign]
        for slab in range(6):
            assert await w.mapper.placer.place(slab)
        await asyncio.sleep(0.5)
        search = await long_search(w, links, 6)
        await asyncio.sleep(9.0)
        assert len(gone) == 1
        assert await search
        await asyncio.sleep(10.0)
        assert set(gone) == {str(link.address) for link in links if link.asked}


@in_virtual_time
async def test_slabs_that_need_a_donor_at_the_same_time_open_one_session_with_each() -> None:
    async with device(*[4] * 8, slabs=16) as (w, links):
        await w.heat(*range(16))
        assert all(link.sessions_opened == 1 for link in links if link.asked)


@in_virtual_time
async def test_the_donor_that_uses_less_memory_gets_the_slab_and_new_ones_come_first() -> None:
    async with device(4, 4) as (w, (busy, idle)):
        busy.used_share, idle.used_share = 0.9, 0.1
        assert await w.mapper.placer.place(0)
        assert await w.mapper.placer.place(1)
        assert (list(idle.mapped), list(busy.mapped)) == ([0], [1])
        assert await w.mapper.placer.place(2)
        assert list(idle.mapped) == [0, 2]


@pytest.mark.parametrize(
    ("change", "wait_s", "detail"),
    [
        ({"is_reachable": False}, 1.0, "no answer"),
        ({"room": 0}, 2.0, "no room"),
        ({"is_busy": True, "used_share": 0.1}, 2.0, "no slab for that"),
    ],
)
@in_virtual_time
async def test_a_donor_that_cannot_take_it_is_passed_over_and_left_alone_for_a_while(
    change: dict[str, float], wait_s: float, detail: str
) -> None:
    w = SlabWorld()
    cannot, can = w.donors(4, 4)
    for name, value in change.items():
        setattr(cannot, name, value)
    async with w.live():
        begun_s = asyncio.get_running_loop().time()
        assert await w.mapper.placer.place(0)
        assert list(can.mapped) == [0]
        assert detail in cannot.detail
        retry_s = w.mapper.known_donors.backoff.retry_s(w.mapper.known_donors.links, begun_s)
        assert retry_s == pytest.approx(begun_s + wait_s, abs=0.01)
        assert await w.mapper.placer.place(1)
        assert cannot.asked == 1


@in_virtual_time
async def test_why_a_donor_has_no_room_is_passed_on() -> None:
    async with device(0) as (w, (link,)):
        link.no_room = "drains"
        assert not await w.mapper.placer.place(0)
        assert link.detail == "no room: the donor drains"


@in_virtual_time
async def test_a_donor_without_a_free_slab_may_have_room_for_one_that_is_needed() -> None:
    async with device(0) as (w, (link,)):
        assert not await w.mapper.placer.place(0, Purpose.AHEAD)
        assert link.detail == ""
        link.room = 1
        assert await w.mapper.placer.place(0)  # it is asked again at once


@in_virtual_time
async def test_a_slab_is_placed_once_and_no_donor_is_forgotten_meanwhile() -> None:
    async with device(4) as (w, (link,)):
        first = asyncio.create_task(w.mapper.placer.place(0))
        await asyncio.sleep(0)
        assert w.mapper.placer.is_placing(0)
        assert not await w.mapper.placer.place(0)
        w.mapper.known_donors.know((), lambda _: pytest.fail("nobody is new"))
        assert w.mapper.known_donors.links == cast(Any, [link])
        assert await first
        assert not w.mapper.placer.is_placing(0)
        assert link.done == [("map", 0)]


@in_virtual_time
async def test_a_slab_that_is_taken_before_it_could_move_is_no_donors_fault() -> None:
    async with device(4, 0, agrees=False) as (w, (old, new)):
        assert await w.mapper.placer.place(0)
        new.room = 4
        assert old.remote is not None
        asyncio.get_running_loop().call_later(0.0015, w.engine.slab_unmap, 0, old.remote, 1)
        await asyncio.sleep(2.0)  # the new one may be asked again
        assert not await w.mapper.placer.place(0, Purpose.MOVE)
        backoff = w.mapper.known_donors.backoff
        assert any(backoff.is_eligible(link, 9.0) for link in w.mapper.known_donors.links)
        assert not new.mapped
