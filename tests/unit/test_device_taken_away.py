# SPDX-License-Identifier: Apache-2.0
"""What others do to a device is said once, and mended when that becomes possible; tests/system has
the kernel's side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.machine.at_once import at_once

from infiniswap.device.frontends import Choice
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.frontends.taken_away import DEVICE, TakenAway
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import UnavailableError


class Kernel:
    """A front end whose block device somebody detaches."""

    block_device = None
    path = "/dev/loop7"

    def __init__(self) -> None:
        self.ours = True
        self.free = False  # whether another one can be had
        self.calls: list[str] = []
        self.tried = asyncio.Event()

    def is_ours(self) -> bool:
        self.calls.append("look")
        return self.ours

    def attach_again(self) -> None:
        self.calls.append("try")
        self.tried.set()
        if not self.free:
            raise UnavailableError("there is no unused loop device")
        self.ours = True


class Device:
    def __init__(self, directory: Path) -> None:
        spec = cast(Any, SimpleNamespace(swap=False, name="d1"))
        paths = DevicePaths("d1", directory, directory)
        attachment = Attachment(spec, paths, Choice("nbd-socket", "for this test"))
        self.kernel, self.alarms = Kernel(), dict[str, str]()
        attachment.kernel = cast(Any, self.kernel)
        self.watch = TakenAway(attachment, self.alarms, at_once, period_s=0.001)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def test_a_device_that_was_detached_is_told_once_and_tried_again(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.watch.look()
    assert "try" not in device.kernel.calls
    device.kernel.ours = False
    for _ in range(3):
        device.watch.look()
    assert device.kernel.calls.count("try") == 3
    assert "/dev/loop7 was detached by somebody else: there is no unused" in device.alarms[DEVICE]
    assert len(caplog.records) == 1
    device.kernel.free = True
    device.watch.look()
    assert DEVICE not in device.alarms
    assert "the device is attached again" in caplog.text
    device.watch.look()
    assert device.kernel.calls.count("try") == 4


async def test_nothing_is_touched_while_the_device_starts_or_stops(device: Device) -> None:
    state, stopping = "starting", asyncio.Lock()
    device.kernel.ours, device.kernel.free = False, True
    task = asyncio.create_task(device.watch.run(stopping, lambda: state == "serving"))
    await asyncio.sleep(0.05)
    assert not device.kernel.calls
    async with stopping:
        state = "serving"  # a stop that was refused, and has not said so yet
        await asyncio.sleep(0.05)
        assert not device.kernel.calls
    await asyncio.wait_for(device.kernel.tried.wait(), 30)
    task.cancel()
    await asyncio.wait({task})
