# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.keep_awake, on made-up hosts."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest
from support.machine.made_host import make_idle
from support.machine.virtual_time import in_virtual_time

from infiniswap.system.keep_awake import (
    CpuLatencyRequest,
    IdleHost,
    IdleState,
    KeepAwake,
    idle_host,
)

POLL = IdleState("POLL", 0)


def host(root: Path, driver: str, *states: tuple[str, int], flags: str = "fpu") -> IdleHost:
    make_idle(root, driver, *states, flags=flags)
    return idle_host(proc=root / "proc", sys=root / "sys")


def test_a_guest_that_halts_is_asked_not_to_sleep(tmp_path: Path) -> None:
    found = host(tmp_path, "haltpoll", ("POLL", 0), ("haltpoll idle", 1), flags="fpu hypervisor")
    assert found == IdleHost("haltpoll", "menu", (POLL, IdleState("haltpoll idle", 1)), True)
    assert found.latency_us == 0


@pytest.mark.parametrize(
    ("idle", "latency_us"),
    [
        (IdleHost("", "menu", (), True), None),
        (IdleHost("acpi_idle", "menu", (), False), None),
        (IdleHost("acpi_idle", "menu", (POLL, IdleState("C1", 0)), False), 1),
        (IdleHost("acpi_idle", "menu", (POLL, IdleState("C1", 1)), True), 0),
        (IdleHost("intel_idle", "menu", (POLL, IdleState("C1", 2), IdleState("C6", 99)), True), 2),
        (IdleHost("intel_idle", "menu", (POLL, IdleState("C1", 2), IdleState("C6", 99)), False), 2),
        (IdleHost("psci_idle", "menu", (IdleState("WFI", 1), IdleState("off", 900)), False), 1),
    ],
)
def test_what_is_asked_for(idle: IdleHost, latency_us: int | None) -> None:
    assert idle.latency_us == latency_us


def test_a_host_without_idle_driver_is_asked_nothing(tmp_path: Path) -> None:
    assert host(tmp_path, "none").latency_us is None
    assert idle_host(proc=tmp_path / "no", sys=tmp_path / "no").latency_us is None


def test_a_request_is_the_open_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    request = CpuLatencyRequest(path)
    assert request.hold(0) is None
    assert request.held == 0
    assert request.hold(0) is None
    assert path.read_bytes() == struct.pack("=i", 0), "written once"
    request.release()
    assert request.held is None


def test_a_missing_file_is_a_named_reason_and_no_exception(tmp_path: Path) -> None:
    request = CpuLatencyRequest(tmp_path / "none")
    problem = request.hold(0)
    assert problem is not None
    assert problem == request.problem
    assert problem.name == "keep-awake"
    assert "No such file" in problem.reason
    assert "--device" in problem.mend
    assert request.held is None
    (tmp_path / "none").touch()
    assert request.check() is None
    assert request.problem is None


def keep_awake(
    path: Path, pages: list[int], mode: str = "auto", latency_us: int | None = 0
) -> KeepAwake:
    request = CpuLatencyRequest(path)
    return KeepAwake(lambda: pages[0], mode, request=request, latency_us=lambda: latency_us)


def is_awake(awake: KeepAwake) -> bool:
    return awake.awake


def test_it_holds_while_pages_come_and_lets_go(tmp_path: Path) -> None:
    path, pages = tmp_path / "latency", [0]
    path.touch()
    awake = keep_awake(path, pages)
    seen = []
    for now_s, pages[0] in ((0.0, 0), (0.25, 1000), (1.25, 1000), (1.5, 1000)):
        awake.tick(now_s)
        seen.append(awake.awake)
    assert seen == [False, True, True, False]


@pytest.mark.parametrize(("mode", "latency_us"), [("off", 0), ("auto", None)])
def test_off_or_without_use_nothing_is_opened_nor_missed(
    tmp_path: Path, mode: str, latency_us: int | None
) -> None:
    pages = [0]
    asleep = keep_awake(tmp_path / "none", pages, mode, latency_us)
    asleep.tick(0.0)
    pages[0] = 10_000
    asleep.tick(1.0)
    assert not asleep.awake
    assert asleep.problem is None


def test_a_refusal_is_known_from_the_start_and_tried_again_rarely(tmp_path: Path) -> None:
    path, pages = tmp_path / "none", [0]
    awake = keep_awake(path, pages)
    assert awake.problem is not None
    tries = 0
    for tick in range(200):
        pages[0] += 1000
        awake.tick(tick * 0.25)
        if tick == 2:
            path.touch()
        tries += awake.awake
    assert tries == 0
    for tick in range(200, 300):
        pages[0] += 1000
        awake.tick(tick * 0.25)
    assert is_awake(awake)
    assert awake.problem is None


async def test_its_end_lets_go(tmp_path: Path) -> None:
    path, pages = tmp_path / "latency", [0]
    path.touch()
    awake = keep_awake(path, pages)
    task = asyncio.create_task(awake.run(), name="keep awake")
    async with asyncio.timeout(30):
        while not is_awake(awake):
            pages[0] += 100_000
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert not is_awake(awake)


@in_virtual_time
async def test_at_rest_it_looks_once_a_second_and_at_once_when_that_ends(tmp_path: Path) -> None:
    path, pages, rests = tmp_path / "latency", 0, True
    path.touch()
    looks: list[float] = []

    def page_ins() -> int:
        looks.append(asyncio.get_running_loop().time())
        return pages

    request = CpuLatencyRequest(path)
    awake = KeepAwake(page_ins, "auto", request=request, latency_us=lambda: 0, rests=lambda: rests)
    task = asyncio.create_task(awake.run(), name="keep awake")
    await asyncio.sleep(60.3)
    assert len(looks) == 61
    rests = False
    awake.used()
    await asyncio.sleep(0.2)
    pages = 1000
    await asyncio.sleep(0.1)
    assert looks[-2:] == [60.3, 60.55]
    assert is_awake(awake)
    task.cancel()
    await asyncio.wait({task})


async def test_with_nothing_to_do_it_waits_for_its_end(tmp_path: Path) -> None:
    task = asyncio.create_task(keep_awake(tmp_path / "none", [0], "off").run(), name="keep awake")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
