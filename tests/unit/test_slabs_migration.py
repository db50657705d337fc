# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.migration: a donor gives a slab back, its pages go to another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from support.devices.slab_world import SLAB_PAGES, ObedientLink, SlabWorld
from support.machine.virtual_time import in_virtual_time

from infiniswap.device.slabs.placer import Purpose

pytestmark = pytest.mark.requires_native


@contextlib.asynccontextmanager
async def filled(
    *slabs: int, has_backup: bool = True
) -> AsyncIterator[tuple[SlabWorld, ObedientLink, ObedientLink]]:
    """A device whose slabs one donor has, with every page; and another donor with nothing."""
    w = SlabWorld(len(slabs), has_backup=has_backup)
    async with w.live(len(slabs), 0) as (leaving, other):
        if not has_backup:
            await w.until(lambda: w.mapped() == list(slabs))
        await w.heat(*slabs)
        await asyncio.sleep(2.5)  # the other one may be asked again
        other.room = 8
        yield w, leaving, other


def pages_at(w: SlabWorld, slab: int) -> int:
    return w.engine.slab(slab).remote_valid_pages


@pytest.mark.parametrize("has_backup", [True, False])
@in_virtual_time
async def test_every_page_is_copied_before_the_slab_goes(has_backup: bool) -> None:
    async with filled(0, has_backup=has_backup) as (w, leaving, other):
        assert await leaving.evict(0)
        assert (leaving.done, other.done) == (
            [("map", 0), ("whole", 0), ("evicted", 0)],
            [("take", 0)],
        )
        assert pages_at(w, 0) == SLAB_PAGES
        assert w.engine.stats()["pages_migrated"] == SLAB_PAGES
        assert w.mapper.counts.moved == w.mapper.counts.evicted == 1
        await asyncio.sleep(5.0)
        assert (w.mapped(), w.mapper.counts.remapped) == ([0], 0)


@in_virtual_time
async def test_with_a_backup_a_move_that_is_out_of_time_ends_and_the_slab_goes() -> None:
    async with filled(0) as (w, leaving, other):
        other.is_stuck = True
        begun_s = asyncio.get_running_loop().time()
        assert not await leaving.evict(0, 1.0)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(1.0, abs=0.1)
        other.is_stuck = False
        await asyncio.sleep(1.0)
        assert (list(leaving.mapped), list(other.mapped)) == ([], [0])
        assert w.mapper.counts.moved == 0


@pytest.mark.parametrize(("move_s", "is_begun"), [(0.0, False), (0.5, True)])
@in_virtual_time
async def test_without_time_nothing_is_copied_where_there_is_a_backup(
    move_s: float, is_begun: bool
) -> None:
    async with filled(0) as (_w, leaving, other):
        await leaving.evict(0, move_s)
        assert (("take", 0) in other.done) is is_begun


@in_virtual_time
async def test_without_a_backup_a_move_goes_on_and_then_gives_the_slab_back() -> None:
    async with filled(0, has_backup=False) as (w, leaving, other):
        other.is_stuck = True
        assert not await leaving.evict(0, 1.0)
        assert list(leaving.mapped) == [0]  # the only copies
        await asyncio.sleep(30.0)
        other.is_stuck = False
        await w.until(lambda: not leaving.mapped, 5.0)
        assert leaving.done[-1] == ("moved", 0)
        assert pages_at(w, 0) == SLAB_PAGES
        assert (w.mapper.counts.moved, w.mapper.counts.lost_pages) == (1, 0)


@pytest.mark.parametrize(("free_after_s", "moves"), [(1.0, True), (4.0, False)])
@in_virtual_time
async def test_a_donor_that_had_no_room_a_moment_ago_is_asked_once_more(
    free_after_s: float, moves: bool
) -> None:
    async with filled(0) as (w, leaving, other):
        other.room = 0
        assert not await w.mapper.placer.place(0, Purpose.MOVE)  # now it is not to be asked
        asyncio.get_running_loop().call_later(free_after_s, setattr, other, "room", 1)
        assert await leaving.evict(0, 6.0) is moves


@in_virtual_time
async def test_slabs_move_one_after_the_other_and_one_that_is_stuck_keeps_none_back() -> None:
    async with filled(0, 1) as (w, leaving, other):
        other.room = 1
        (third,) = w.donors(0)
        other.is_stuck = True
        evicting = [asyncio.create_task(leaving.evict(0, 30.0))]
        await w.until(lambda: 0 in other.mapped)
        third.room = 1
        evicting.append(asyncio.create_task(leaving.evict(1, 30.0)))
        assert await evicting[1]
        assert 1 in third.mapped
        other.is_stuck = False
        await asyncio.wait(evicting)


@pytest.mark.parametrize("has_backup", [True, False])
@in_virtual_time
async def test_a_move_whose_donor_has_lost_its_session_is_finished_all_the_same(
    has_backup: bool,
) -> None:
    """Nobody asks for the slab any longer, and it is at two donors."""
    async with filled(0, has_backup=has_backup) as (w, leaving, _other):
        leaving.room = -9
        assert await w.mapper.placer.place(0, Purpose.MOVE)
        w.submit(0, 1)  # or the mapper sees no reason to look
        await w.until(lambda: not leaving.mapped, 5.0)
        assert leaving.done[-1] == ("moved", 0)
        assert (pages_at(w, 0), w.mapper.counts.moved) == (SLAB_PAGES, 1)


@in_virtual_time
async def test_a_slab_that_is_on_its_way_from_elsewhere_does_not_move_on() -> None:
    async with filled(0) as (w, leaving, other):
        other.is_stuck = True
        evicting = asyncio.create_task(leaving.evict(0, 3.0))
        await w.until(lambda: bool(other.mapped))
        assert not await w.mapper.move(cast(Any, other), 0, 1.0)
        other.is_stuck = False
        assert await evicting


@in_virtual_time
async def test_a_move_that_its_donor_waits_for_is_not_begun_and_counted_again() -> None:
    """The mapper looks at the slabs before the donor has taken its slab off."""
    async with filled(0) as (w, leaving, _other):
        assert await w.mapper.move(cast(Any, leaving), 0, 3.0)
        w.donors(0)  # wakes it
        await asyncio.sleep(0.5)
        assert (w.mapper.counts.moved, list(leaving.mapped)) == (1, [0])
