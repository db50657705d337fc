# SPDX-License-Identifier: Apache-2.0
"""What ends of a front end is mended, or the standby gets its turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from support.devices.holder_pair import Pair
from support.machine.at_once import at_once

from infiniswap.device.succession.holder import Holder
from infiniswap.device.succession.repairs import FRONT_END, Repairs
from infiniswap.errors import SystemCallError


class Kernel:
    """A front end's side of the kernel."""

    def __init__(self) -> None:
        self.left: list[bool | SystemCallError] = [True]  # the last one for good
        self.repaired = 0
        self.asked = asyncio.Event()

    def repair(self) -> None:
        self.repaired += 1

    def is_left(self) -> bool:
        self.asked.set()
        answer = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if isinstance(answer, SystemCallError):
            raise answer
        return answer


class Reports:
    """In place of the mapper."""

    def __init__(self) -> None:
        self.alarms: dict[str, str] = {}
        self.on_connection_lost: Callable[[], None] = lambda: None

    def front_end_down(self) -> None:
        self.alarms[FRONT_END] = "the front end has ended"
        self.on_connection_lost()


class Device:
    """With its holder's end of the pair."""

    def __init__(self, holder: Holder, theirs: socket.socket) -> None:
        self.holder, self.theirs = holder, theirs
        self.kernel, self.reports = Kernel(), Reports()
        self.repairs = Repairs(cast(Any, self.kernel), holder, self.reports, at_once, steady_s=0.0)

    async def standby_is_ready(self) -> None:
        heard, tell = asyncio.Event(), self.holder.on_standby
        self.holder.on_standby = heard.set
        self.theirs.send(b"standby ready")
        await asyncio.wait_for(heard.wait(), 30)
        self.holder.on_standby = tell
        tell()

    async def said(self) -> str:
        return (await asyncio.wait_for(asyncio.to_thread(self.theirs.recv, 4096), 30)).decode()

    async def rest(self) -> None:
        """Until it waits again."""
        for _ in range(20):
            await asyncio.sleep(0)

    def has_said(self) -> bool:
        try:
            return bool(self.theirs.recv(4096, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False


@pytest.fixture
async def device(holder_pair: Pair) -> AsyncIterator[Device]:
    holder, theirs = holder_pair
    holder.listen(lambda: None)
    made = Device(holder, theirs)
    task = asyncio.create_task(made.repairs.run())
    await made.rest()
    assert made.kernel.repaired == 1  # one may have been lost before
    yield made
    task.cancel()
    await asyncio.wait({task})
    holder.close()


async def test_where_there_is_no_standby_it_is_waited_for(device: Device) -> None:
    device.reports.front_end_down()
    await device.rest()
    assert not device.has_said()
    assert FRONT_END in device.reports.alarms
    await device.standby_is_ready()
    assert await device.said() == "yield"
    # Refused, as that one has died just now; so the next one.
    device.theirs.send(b"refused no standby is ready")
    device.theirs.send(b"standby none it has died; another one is started")
    await device.standby_is_ready()
    assert await device.said() == "yield"


async def test_what_nobody_could_take_over_stays_an_alarm(device: Device) -> None:
    device.kernel.left = [False]
    await device.standby_is_ready()
    device.reports.front_end_down()
    await device.kernel.asked.wait()
    await device.rest()
    assert not device.has_said()
    assert FRONT_END in device.reports.alarms


async def test_what_the_kernel_did_not_say_is_asked_again(
    device: Device,
) -> None:
    device.kernel.left = [SystemCallError("not now"), True]
    await device.standby_is_ready()
    device.reports.front_end_down()
    assert await device.said() == "yield"


async def test_a_lost_connection_is_mended(device: Device) -> None:
    await device.standby_is_ready()
    device.reports.on_connection_lost()
    await device.rest()
    assert device.kernel.repaired > 1
    assert not device.has_said()
