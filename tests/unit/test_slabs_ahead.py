# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.ahead: slabs that get a donor before they are hot."""

from __future__ import annotations

import asyncio

import pytest
from support.devices.slab_world import SlabWorld, device
from support.machine.virtual_time import in_virtual_time

pytestmark = pytest.mark.requires_native


async def ahead(w: SlabWorld) -> int:
    """A slab that is mapped, and that nothing was written to."""
    await w.until(lambda: bool(w.mapped()))
    return w.mapped()[-1]


@in_virtual_time
async def test_the_first_page_of_a_slab_that_was_mapped_ahead_is_told_to_its_donor() -> None:
    async with device(8, ahead=True) as (w, (link,)):
        slab = await ahead(w)
        await asyncio.sleep(5.0)
        assert ("keep", slab) not in link.told
        w.page_out(slab, 1)
        await w.until(lambda: ("keep", slab) in link.told, 2.0)


@pytest.mark.parametrize("is_touched", [False, True])
@in_virtual_time
async def test_only_a_slab_that_was_written_to_is_moved_counted_as_evicted_and_wanted_back(
    is_touched: bool,
) -> None:
    w = SlabWorld(ahead=True)
    # The world takes every slab that went back for a lost one.
    async with w.live(8, agrees=is_touched) as (link,):
        slab = await ahead(w)
        (other,) = w.donors(0)
        link.room = -9
        if is_touched:
            w.page_out(slab)
            await asyncio.sleep(0.5)
        other.room = 8
        assert await link.evict(slab) is is_touched
        counts = w.mapper.counts
        assert (counts.evicted, counts.returned) == ((1, 0) if is_touched else (0, 1))
        assert counts.moved == is_touched
        assert (slab in other.mapped) is is_touched
        await asyncio.sleep(1.0)
        assert counts.remapped == 0


@in_virtual_time
async def test_a_donor_without_a_free_slab_is_left_alone_but_gets_what_is_needed() -> None:
    async with device(0, ahead=True) as (w, (link,)):
        await asyncio.sleep(3.0)
        assert w.mapped() == []
        asked = link.asked
        assert asked <= 3
        link.room = 1
        await w.heat(0)
        assert link.done == [("map", 0)]


@in_virtual_time
async def test_swap_area_and_far_memory_have_a_front_each() -> None:
    w = SlabWorld(8, ahead=True, ranges=(4, 4))
    async with w.live(8):
        await w.until(lambda: w.mapped() == [0, 1, 4, 5])
        w.page_out(4)
        await w.until(lambda: 6 in w.mapped())
        assert 2 not in w.mapped()
        w.page_out(0)
        await w.until(lambda: 2 in w.mapped())
