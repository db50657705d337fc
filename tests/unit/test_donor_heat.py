# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.heat: what devices say of their slabs, asked for by whoever wants the status."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from support.donors.lease_records import lease_record

from infiniswap.control import messages as m
from infiniswap.donor.heat import FRESH_S, SILENT_S, Heat, Said
from infiniswap.donor.leases import LeaseTable
from infiniswap.errors import DeadlineError


class Device:
    """A session, as Heat asks it."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_mute = False

    async def activity(self, lease: int, wait_s: float) -> m.ActivityAnswer:
        self.asked += 1
        await asyncio.sleep(0)
        if self.is_mute:
            raise DeadlineError("no answer")
        return m.ActivityAnswer(id=1, slots=[m.SlotActivity(0, 12.34567)])


class World:
    """Two leases with a slab each, and their devices."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.table = LeaseTable(10.0, 4)
        self.devices = {1: Device(), 2: Device()}
        self.heat = Heat(self.table, cast(Any, self), lambda: self.now_s)
        for number in self.devices:
            self.table.session_opened(number)
            entry = self.table.grant(lease_record(lease=number), number, 0.0)
            entry.slots = {0: m.SlotInfo(0, 1, 7), 3: m.SlotInfo(3, 1, 2)}

    def owner_of(self, lease: int) -> Any:
        return self.devices.get(lease)

    async def refresh(self, after_s: float = FRESH_S) -> list[int]:
        """Asks; returns how often each device was asked by now."""
        self.now_s += after_s
        await self.heat.refresh()
        return [device.asked for device in self.devices.values()]


@pytest.fixture
def world() -> World:
    return World()


async def test_slabs_are_listed_by_number_also_before_anybody_was_asked(world: World) -> None:
    lease = world.table.leases()[0]
    assert world.heat.slabs(lease) == [m.SlabUse(2, None), m.SlabUse(7, None)]
    await world.refresh()
    assert world.heat.slabs(lease) == [m.SlabUse(2, None), m.SlabUse(7, 12.3)]


async def test_however_many_ask_devices_are_asked_once_a_second(world: World) -> None:
    await asyncio.gather(*(world.heat.refresh() for _ in range(10)))
    assert await world.refresh(FRESH_S / 2) == [1, 1]
    assert await world.refresh(FRESH_S / 2) == [2, 2]


async def test_a_device_that_does_not_answer_is_left_alone_for_a_while(world: World) -> None:
    await world.refresh()
    world.devices[1].is_mute = True
    assert await world.refresh() == [2, 2]
    assert world.heat.said(1) == Said()  # what it said before is old
    assert world.heat.said(2).pages_per_s
    assert await world.refresh() == [2, 3]
    assert await world.refresh(SILENT_S) == [3, 4]


async def test_who_has_nothing_here_or_is_not_connected_is_not_asked(world: World) -> None:
    world.table.leases()[0].slots = {}
    world.devices.pop(2)
    assert await world.refresh() == [0]
