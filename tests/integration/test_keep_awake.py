# SPDX-License-Identifier: Apache-2.0
"""Processors are kept awake by processes that page in, and by nobody else."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import Cluster, Device, until
from support.devices.nbd_client import connected

from infiniswap.system.keep_awake import REQUEST_PATH

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_idle_states]

_READ_BYTES = 64 * 1024


def holds(pid: int) -> bool:
    """Whether the process has a request in force; one that has ended has none."""
    links = []
    with contextlib.suppress(OSError):
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    for link in links:
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(REQUEST_PATH):
                return True
    return False


@contextlib.contextmanager
def page_ins(device: Device) -> Iterator[None]:
    """One reader, as fast as the device answers, as long as the block lasts."""
    stop = threading.Event()

    def read() -> None:
        # Ends with its connection, too: the device may be killed meanwhile.
        with (
            contextlib.suppress(OSError, struct.error),
            connected(device.socket) as client,
        ):
            offset = 0
            while not stop.is_set():
                nbd.read(client, offset, _READ_BYTES)
                offset = (offset + _READ_BYTES) % (32 << 20)

    reader = threading.Thread(target=read, name="reader")
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


def start(cluster: Cluster, **changes: str) -> Device:
    return cluster.start("--frontend", "nbd-socket", size="32M", **changes)


def write_all(device: Device) -> None:
    with connected(device.socket) as client:
        for offset in range(0, 32 << 20, 1 << 19):
            assert nbd.write(client, offset, b"x" * (1 << 19)) == 0


def awake_is(device: Device, wanted: bool) -> Callable[[], bool]:
    pid = device.pid
    return lambda: holds(pid) == wanted


def test_a_device_holds_the_request_while_pages_come_in(shared_cluster: Cluster) -> None:
    device = start(shared_cluster)
    assert not holds(device.pid)
    assert device.status["awake"] is False
    with page_ins(device):
        until(awake_is(device, True), "a request in force")
        # Each until it says so: starved of its processor the reader may pause meanwhile.
        until(lambda: device.status["awake"] is True, "the status to tell")
        until(
            lambda: "kept awake" in shared_cluster.ok("device", "show", device.name),
            "the table to tell",
        )
    until(awake_is(device, False), "no request any more")
    assert device.status["awake"] is False
    assert not any(item.startswith("keep-awake") for item in device.status["degraded"])


def test_off_is_off(shared_cluster: Cluster) -> None:
    device = start(shared_cluster, INFINISWAP_DEVICE_KEEP_AWAKE="off")
    with page_ins(device):
        before = device.status["stats"]["pages_in"]
        until(lambda: device.status["stats"]["pages_in"] > before + 10_000, "page-ins")
        assert not holds(device.pid)
        assert device.status["awake"] is False


@pytest.mark.parametrize(("mode", "wanted"), [("auto", True), ("off", False)])
def test_a_donor_does_so_only_when_told_to(cluster: Cluster, mode: str, wanted: bool) -> None:
    cluster.env["INFINISWAP_DAEMON_KEEP_AWAKE"] = mode
    donor = cluster.donor()
    cluster.env.pop("INFINISWAP_DAEMON_KEEP_AWAKE")
    device = start(cluster)
    assert not holds(donor.process.pid)

    def written() -> bool:
        write_all(device)
        return int(device.status["pages_on_donors"]) > 4096

    until(written, "pages there")
    with page_ins(device):
        if wanted:
            until(lambda: holds(donor.process.pid), "a request in force at the donor")
        else:
            before = device.status["stats"]["pages_in_remote"]
            until(
                lambda: device.status["stats"]["pages_in_remote"] > before + 10_000, "remote reads"
            )
            assert not holds(donor.process.pid)
    until(lambda: not holds(donor.process.pid), "no request any more")
