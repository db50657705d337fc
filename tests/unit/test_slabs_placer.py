# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.placer: a donor for one slab."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import pytest
from support.devices.slab_world import ObedientLink, SlabWorld, device
from support.machine.virtual_time import in_virtual_time

from infiniswap.device.slabs.asked import AskedDonors
from infiniswap.device.slabs.placer import Purpose
from infiniswap.device.slabs.tasks import Tasks

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


def with_sessions(links: list[ObedientLink]) -> list[ObedientLink]:
    return [link for link in links if link.has_session]


def asked_by(links: list[ObedientLink], before: list[int]) -> list[ObedientLink]:
    return [link for link, count in zip(links, before, strict=True) if link.asked > count]


@contextlib.asynccontextmanager
async def grown(
    seed: int, donors: int, slabs: int
) -> AsyncIterator[tuple[SlabWorld, list[ObedientLink]]]:
    """A device of four slabs, so many of which have just found donors."""
    w = SlabWorld(slabs=4, seed=seed)
    links = w.donors(*[16] * donors)
    async with w.live():
        for slab in range(slabs):
            await placed(w, links, slab)
        yield w, links


async def placed(w: SlabWorld, links: list[ObedientLink], slab: int) -> list[ObedientLink]:
    """Whom it has asked."""
    before = [link.asked for link in links]
    assert await w.mapper.placer.place(slab)
    await asyncio.sleep(0.1)
    return asked_by(links, before)


@in_virtual_time
async def test_whom_the_next_slab_of_a_device_that_grows_asks_has_a_session_by_then() -> None:
    async with device(*[16] * 40, slabs=16) as (w, links):
        first = await placed(w, links, 0)
        assert with_sessions(links) == first  # it may be the only one
        second = await placed(w, links, 1)
        ahead = [link for link in with_sessions(links) if link not in first + second]
        assert len(ahead) == 2
        assert await placed(w, links, 2) == ahead
        assert all(link.sessions_opened == 1 for link in with_sessions(links))
        await asyncio.sleep(6.0)
        opened = sum(link.sessions_opened for link in links)
        others = await placed(w, links, 3)  # the draw is too old
        await asyncio.sleep(4.0)
        assert sum(link.sessions_opened for link in links) <= opened + len(others)


@in_virtual_time
async def test_sessions_are_opened_with_donors_that_will_have_no_slab_by_then() -> None:
    for seed in range(10):
        async with grown(seed, donors=4, slabs=2) as (_, links):
            assert with_sessions(links) == links


@in_virtual_time
async def test_searches_at_the_same_time_ask_donors_of_their_own() -> None:
    async with device(*[16] * 60, slabs=16) as (w, links):
        for slab in range(3):
            await placed(w, links, slab)
        before = [link.asked for link in links]
        assert all(await asyncio.gather(w.mapper.placer.place(3), w.mapper.placer.place(4)))
        assert len(asked_by(links, before)) == 4


@in_virtual_time
async def test_donors_that_came_since_the_last_slab_are_asked_like_all_others() -> None:
    asked_new = 0
    for seed in range(40):
        async with grown(seed, donors=3, slabs=2) as (w, links):
            await asyncio.sleep(60.0)
            links += w.donors(*[16] * 17)
            asked_new += sum(link in links[3:] for link in await placed(w, links, 2))
    assert asked_new > 60  # of 80; 17 of the 18 without a slab are new


@in_virtual_time
async def test_what_was_drawn_ahead_is_drawn_as_often_as_all_others() -> None:
    times = dict.fromkeys(range(6), 0)
    for seed in range(300):
        async with grown(seed, donors=6, slabs=3) as (_, links):
            (third,) = [n for n, link in enumerate(links) if 2 in link.mapped]
            assert list(links[third].mapped) == [2]
            times[third] += 1
    assert min(times.values()) > 25  # of 50 each


@in_virtual_time
async def test_who_was_asked_in_vain_is_let_go_of_when_no_slab_has_found_a_donor_for_a_while() -> (
    None
):
    async with device(*[16] * 8, slabs=16) as (w, links):
        await placed(w, links, 0)
        await asyncio.sleep(4.0)
        kept = with_sessions(links)
        assert [link for link in kept if not link.mapped]
        await placed(w, links, 1)
        await asyncio.sleep(4.0)
        assert set(kept) <= set(with_sessions(links))
        await asyncio.sleep(1.5)
        assert [link for link in links if link.mapped] == with_sessions(links)
        search = await long_search(w, links, 2)
        await asyncio.sleep(9.0)
        assert len(with_sessions(links)) >= 2
        assert await search
        await asyncio.sleep(10.5)
        assert [link for link in links if link.mapped] == with_sessions(links)


@in_virtual_time
async def test_a_device_that_finds_no_room_keeps_no_session() -> None:
    async with device(*[0] * 20, slabs=1) as (w, links):
        for _ in range(40):
            assert not await w.mapper.placer.place(0)
            await asyncio.sleep(0.25)
            assert not with_sessions(links)
        assert all(link.asked > 3 for link in links)


@in_virtual_time
async def test_a_donor_that_hangs_when_it_is_let_go_of_holds_up_no_search() -> None:
    async with device(*[4] * 3, slabs=16) as (w, links):
        for link in links:
            link.let_go = partial(asyncio.sleep, 60.0)  # type: ignore[method-assign]
        begun_s = asyncio.get_running_loop().time()
        for slab in range(8):
            await asyncio.sleep(6.0)
            assert await w.mapper.placer.place(slab)
        assert asyncio.get_running_loop().time() < begun_s + 8 * 7.0


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
        await asyncio.sleep(5.5)
        before = [link.asked for link in links]
        search = await long_search(w, links, 6)
        await asyncio.sleep(9.0)
        (first,) = gone
        assert await search
        await asyncio.sleep(20.0)
        let_go_of = [link for link in links if link.sessions_opened]
        # Who was asked while being let go of has a session once more.
        let_go_of += [link for link in asked_by(links, before) if str(link.address) == first]
        assert sorted(gone) == sorted(str(link.address) for link in let_go_of)


@in_virtual_time
async def test_a_donor_that_does_not_answer_ahead_of_need_is_not_dialled_a_second_time() -> None:
    async with device(*[16] * 3, slabs=16) as (w, links):
        await placed(w, links, 0)
        others = [link for link in links if not link.mapped]
        for link in others:
            await link.let_go()
            link.is_reachable, link.answer_s = False, 3.0
        await placed(w, links, 1)  # at the donor that has a slab already
        await asyncio.sleep(0.9)  # of the three seconds that the next attempt takes
        for link in others:
            link.detail = ""
        begun_s = asyncio.get_running_loop().time()
        assert await w.mapper.placer.place(2)
        assert begun_s + 1.5 < asyncio.get_running_loop().time() < begun_s + 2.5
        assert all("no answer" in link.detail for link in others)
        for link in others:  # it is not out of the game
            link.is_reachable, link.answer_s = True, 0.001
        await asyncio.sleep(10.0)
        assert set(await placed(w, links, 3)) == set(others)


@in_virtual_time
async def test_a_session_that_is_being_opened_is_not_opened_twice() -> None:
    async with device(4) as (w, (link,)):
        asked = AskedDonors(w.mapper.known_donors, Tasks())
        for _ in range(3):
            asked.open([cast(Any, link)])
        assert await asked.may_ask(cast(Any, link))
        await asyncio.sleep(1.0)
        assert link.sessions_opened == 1


@in_virtual_time
async def test_an_opening_that_was_cancelled_before_it_began_keeps_nobody_from_the_donor() -> None:
    async with device(4) as (w, (link,)):
        tasks = Tasks()
        asked = AskedDonors(w.mapper.known_donors, tasks)
        asked.open([cast(Any, link)])
        await tasks.close()
        assert await asked.may_ask(cast(Any, link))
        asked.open([cast(Any, link)])
        assert await asked.may_ask(cast(Any, link))
        assert link.sessions_opened == 1


@in_virtual_time
async def test_a_donor_that_is_gone_is_forgotten_once_its_session_has_ended() -> None:
    async with device(*[16] * 3, slabs=16) as (w, links):
        assert await w.mapper.placer.place(0)
        holder = next(link for link in links if link.mapped)
        w.mapper.known_donors.know([holder.address], lambda _: pytest.fail("nobody is new"))
        assert len(w.mapper.known_donors.links) > 1
        await asyncio.sleep(7.0)
        assert w.mapper.known_donors.links == cast(Any, [holder])


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
