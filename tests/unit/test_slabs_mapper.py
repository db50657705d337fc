# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.mapper: which slab gets a donor when, and when it goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.devices.slab_world import SLAB_PAGES, SlabWorld, device
from support.devices.stepped_engine import lib
from support.machine.virtual_time import in_virtual_time

from infiniswap.config import PolicyConfig
from infiniswap.engine.protocol import SlabInfo

pytestmark = pytest.mark.requires_native


@in_virtual_time
async def test_a_slab_gets_a_donor_when_it_is_hot_and_no_sooner() -> None:
    async with device(4, policy=PolicyConfig(period_s=1.0, hot_pages_per_s=20.0)) as (w, _):
        for _ in range(60):
            w.page_out(0, 10)  # ten pages a second
            await asyncio.sleep(1.0)
        assert w.mapped() == []
        w.mapper.tune(PolicyConfig(period_s=1.0, hot_pages_per_s=5.0), 0.0)
        w.page_out(0, 1)
        await asyncio.sleep(1.0)
        assert w.mapped() == [0]
        assert (w.mapper.counts.mapped, w.mapper.counts.remapped) == (1, 0)


@in_virtual_time
async def test_the_hottest_slab_gets_the_only_room() -> None:
    async with device(0) as (w, (link,)):
        for tenths in range(30):
            for slab, pages in ((0, 8), (1, 16), (2, 12)):
                w.page_out(slab, pages)
            await asyncio.sleep(0.1)
            if tenths == 10:
                assert link.asked == 1  # where nobody has room no other slab would find any
                link.room = 1
        assert w.mapped() == [1]
        assert not w.mapper.alarms  # they have a backup


@in_virtual_time
async def test_without_a_backup_every_slab_gets_a_donor_and_what_lacks_one_raises_the_alarm() -> (
    None
):
    async with device(3, 0, slabs=4, has_backup=False) as (w, (first, second)):
        await asyncio.sleep(1.0)
        assert w.mapped() == [0, 1, 2]
        assert "neither a donor nor a backup" in w.mapper.alarms["no-donor"]
        second.room = 1
        await asyncio.sleep(10.0)
        assert w.mapped() == [0, 1, 2, 3]
        assert not w.mapper.alarms
        await asyncio.sleep(120.0)
        assert (len(first.mapped), len(second.mapped)) == (3, 1)  # empty, and all the same


@in_virtual_time
async def test_a_slab_that_has_lost_its_donor_gets_another_one_without_getting_hot_again() -> None:
    async with device(1) as (w, (first,)):
        await w.heat(0)
        await asyncio.sleep(20.0)
        await first.die()
        await asyncio.sleep(5.0)
        assert w.mapped() == []
        (second,) = w.donors(1)
        await w.until(lambda: 0 in second.mapped, 1.0)
        assert (w.mapper.counts.mapped, w.mapper.counts.remapped) == (2, 1)


@in_virtual_time
async def test_a_donor_that_took_a_slab_back_is_not_asked_for_two_seconds() -> None:
    async with device(1, 0) as (w, (first, second)):
        await w.heat(0)
        await first.evict(0, 0.0)
        first.room = 1
        took_s = await w.until(lambda: 0 in first.mapped)
        assert took_s == pytest.approx(2.0, abs=0.3)
        assert (w.mapper.counts.evicted, w.mapper.counts.remapped) == (1, 1)
        assert not second.mapped


@in_virtual_time
async def test_a_slab_that_its_donor_refuses_is_taken_off_it() -> None:
    async with device(1, 0) as (w, (first, second)):
        await w.heat(0)
        w.submit(0, 1)
        assert first.remote is not None
        assert w.engine.step(lib.ISW_STEP_REMOTE_FAIL, first.remote)
        second.room = 1
        second.used_share = 0.1  # else the first one may get the slab once more
        await w.until(lambda: 0 in second.mapped)
        assert first.done == [("map", 0), ("refused", 0)]
        assert first.told == [("refused",)]


@pytest.mark.parametrize("pages", [0, 1])
@in_virtual_time
async def test_an_empty_slab_that_rests_goes_back_after_half_a_minute(pages: int) -> None:
    async with device(2) as (w, _):
        await w.heat(0)
        w.discard(0)
        if pages:
            w.page_out(0, pages)
        await asyncio.sleep(29.0)
        assert w.mapped() == [0]
        await asyncio.sleep(5.0)
        assert w.mapped() == ([0] if pages else [])
        assert w.mapper.counts.returned == (not pages)
        await asyncio.sleep(60.0)
        assert w.mapper.counts.remapped == 0  # nor is it wanted back


@in_virtual_time
async def test_the_half_minute_begins_again_with_each_use() -> None:
    async with device(2) as (w, _):
        await w.heat(0)
        for _ in range(4):
            w.discard(0)
            await asyncio.sleep(20.0)
            w.page_out(0, 8)
            await asyncio.sleep(0.3)
        assert w.mapped() == [0]


@in_virtual_time
async def test_lost_pages_are_added_up_in_one_alarm() -> None:
    w = SlabWorld(has_backup=False)
    w.mapper.pages_lost(1, "with donors that are gone")
    assert w.mapper.alarms["lost-pages"].startswith("1 page is lost with donors")
    w.mapper.pages_lost(6, "to donor x")
    assert w.mapper.counts.lost_pages == 7
    assert w.mapper.alarms["lost-pages"] == "7 pages are lost to donor x, as there is no backup"
    w.engine.close()


@in_virtual_time
async def test_slabs_are_looked_at_once_a_second_while_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []

    w = SlabWorld()
    w.donors(2)
    slabs = w.engine.slabs

    def look() -> Sequence[SlabInfo]:
        looks.append(asyncio.get_running_loop().time())
        return slabs()

    monkeypatch.setattr(w.engine, "slabs", look)
    async with w.live():
        await asyncio.sleep(5.0)
        at_rest = len(looks)
        for _ in range(100):
            w.page_out(0, 1)
            await asyncio.sleep(0.05)
        assert at_rest == pytest.approx(5, abs=1)
        assert len(looks) - at_rest == pytest.approx(50, abs=3)


def rests(w: SlabWorld) -> bool:
    return w.mapper.rests


@in_virtual_time
async def test_a_device_at_rest_is_looked_at_at_once_when_it_is_used() -> None:
    w = SlabWorld()
    w.donors(2)
    uses: list[float] = []
    w.mapper.events.on_use.append(lambda: uses.append(asyncio.get_running_loop().time()))
    async with w.live():
        await asyncio.sleep(5.3)
        assert rests(w)
        w.submit(0, 1)
        await asyncio.sleep(0.001)
        assert not rests(w)
        w.discard(1)  # moves no page
        for _ in range(20):
            w.page_out(0, 1)
            await asyncio.sleep(0.01)
        assert uses == pytest.approx([5.3])  # one report for all of them
        await asyncio.sleep(2.0)
        assert rests(w)
        w.discard(0)
        await asyncio.sleep(1.0)
        assert len(uses) == 1


@in_virtual_time
async def test_the_mapper_ends_with_the_filler_and_says_why() -> None:
    w = SlabWorld()

    async def fails() -> None:
        raise RuntimeError("a bug")

    w.mapper._filler.run = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug"):
        await w.mapper.run()
    w.engine.close()


@in_virtual_time
async def test_every_state_is_counted() -> None:
    async with device(4, slabs=4) as (w, _):
        await w.heat(1, 2)
        states: dict[str, Any] = w.mapper.slab_states()
        assert states == {"unmapped": 2, "mapped": 2, "suspended": 0, "draining": 0}


@in_virtual_time
async def test_a_slab_that_got_a_donor_is_filled_from_the_backup() -> None:
    async with device(4, agrees=False, refill_pages_per_s=1000.0) as (w, _):
        w.page_out(1)  # to the backup only
        w.mapper.lost(1)
        await w.until(lambda: w.engine.slab(1).remote_valid_pages == SLAB_PAGES)
        assert w.engine.stats()["pages_copied"] == SLAB_PAGES
