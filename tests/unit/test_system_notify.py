# SPDX-License-Identifier: Apache-2.0
"""What a service tells its manager, read at the other end of a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniswap.device.control.launch import device_environment
from infiniswap.system.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(60)
        yield sock


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


def test_ready_and_stopping_with_what_status_shows(manager: socket.socket) -> None:
    notifier = Notifier(environment(manager))
    assert notifier.managed
    notifier.ready("8G at /dev/loop0")
    notifier.stopping()
    assert manager.recv(4096) == b"READY=1\nSTATUS=8G at /dev/loop0"
    assert manager.recv(4096) == b"STOPPING=1\nSTATUS=stopping"


def test_a_name_in_the_abstract_name_space() -> None:
    name = f"infiniswap-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(60)
        Notifier({"NOTIFY_SOCKET": "@" + name}).say("READY=1")
        assert sock.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", ["", "/no/such/socket", "relative", "x" * 200])
def test_nobody_listens_and_nothing_fails(address: str) -> None:
    Notifier({"NOTIFY_SOCKET": address} if address else {}).ready("x")


@pytest.mark.parametrize(
    ("usec", "pid", "wanted_s"),
    [
        ("30000000", None, 30.0),
        pytest.param("30000000", str(os.getpid()), 30.0, id="own"),
        ("30000000", "1", 0.0),  # meant for another process
        ("", None, 0.0),
        ("soon", None, 0.0),
    ],
)
def test_the_watchdogs_period(usec: str, pid: str | None, wanted_s: float) -> None:
    env = {"WATCHDOG_USEC": usec} | ({} if pid is None else {"WATCHDOG_PID": pid})
    assert Notifier(env).watchdog_s == wanted_s


async def test_the_watchdog_hears_as_long_as_all_is_well(manager: socket.socket) -> None:
    notifier = Notifier(environment(manager, WATCHDOG_USEC="3000"))
    well = True
    task = asyncio.create_task(notifier.watchdog(lambda: well))
    loop = asyncio.get_running_loop()
    manager.setblocking(False)
    for _ in range(3):
        assert await loop.sock_recv(manager, 4096) == b"WATCHDOG=1"
    well = False
    while True:  # what was on its way
        try:
            manager.recv(4096)
        except BlockingIOError:
            break
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loop.sock_recv(manager, 4096), 0.1)
    task.cancel()


async def test_without_a_watchdog_there_is_nothing_to_do(manager: socket.socket) -> None:
    await asyncio.wait_for(Notifier(environment(manager)).watchdog(), 60)
    await asyncio.wait_for(Notifier({"WATCHDOG_USEC": "1000"}).watchdog(), 60)


def test_a_device_process_does_not_speak_for_its_starter() -> None:
    base = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(device_environment(base))
