# SPDX-License-Identifier: Apache-2.0
"""Devices with the front end nbd, as users have them: block sizes, file systems, a slow process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, run, until
from support.jobs.fiojob import VERIFY, fio, stress_a_file_system, verify_every_block_size

from infiniswap.errors import ConflictError, UnavailableError
from infiniswap.system import nbd
from infiniswap.units import MIB

pytestmark = [pytest.mark.kernels("6.12", "6.1"), pytest.mark.usefixtures("nbd_driver")]


@pytest.fixture(scope="module")
def device(nbd_driver: None, module_cluster: Cluster) -> Iterator[Device]:
    device = module_cluster.start("--frontend", "nbd")
    yield device
    assert "Traceback" not in device.log
    assert device.status["stats"]["requests_failed"] == 0
    device.remove()
    assert not nbd.devices()


@pytest.mark.full  # minutes here
def test_fio_verifies_every_block_size(device: Device) -> None:
    assert device.status["frontend"] == "nbd"
    verify_every_block_size(device.path)


def test_a_file_system_under_stress_is_clean(device: Device, tmp_path: Path) -> None:
    stress_a_file_system(device.path, tmp_path)


def test_discarded_blocks_are_zeros(device: Device) -> None:
    before = device.status["stats"]
    with device.path.open("r+b", buffering=0) as file:
        file.write(b"\xa5" * MIB)
        os.fsync(file.fileno())
    run("blkdiscard", "-o", "0", "-l", str(MIB), device.path)
    run("blockdev", "--flushbufs", device.path)
    with device.path.open("rb") as file:
        assert file.read(MIB) == bytes(MIB)
    assert device.status["stats"]["trim_requests"] > before["trim_requests"]


def test_a_flush_reaches_the_backup(device: Device) -> None:
    before = device.status["stats"]["flush_requests"]
    with device.path.open("r+b", buffering=0) as file:
        file.write(os.urandom(4096))
        os.fsync(file.fileno())
    assert device.status["stats"]["flush_requests"] > before


def test_the_queue_is_made_for_swap(device: Device) -> None:
    queue = Path("/sys/block", device.path.resolve().name, "queue")
    wanted = {
        "rotational": "0",
        "logical_block_size": "4096",
        "max_sectors_kb": "128",
        "discard_granularity": "4096",
        "write_cache": "write back",
        "fua": "1",
    }
    assert {name: (queue / name).read_text().strip() for name in wanted} == wanted
    # Doubled for each time that this machine was too slow for it.
    doubled, rest = divmod(int((queue / "io_timeout").read_text()), nbd.REQUEST_TIMEOUT_S * 1000)
    assert doubled in (1, 2, 4, 8, 16)
    assert rest == 0
    assert device.path.resolve().name.startswith("nbd")


@pytest.mark.kernels("6.1")
def test_auto_takes_it_where_the_kernel_is_too_old_for_ublk(module_cluster: Cluster) -> None:
    name, donors = module_cluster.name(), module_cluster.addresses
    command = ["device", "start", name, "--donors", donors, "--size", "16M", "--frontend"]
    refused = module_cluster.cli(*command, "ublk")
    assert refused.returncode == UnavailableError.exit_code, refused.stderr
    assert "is too old for ublk devices: Linux 6.5 or later is needed" in refused.stderr
    assert "modprobe" not in refused.stderr
    started = module_cluster.cli(*command, "auto")
    assert started.returncode == 0, started.stderr
    device = Device(module_cluster, name)
    assert device.status["frontend"] == "nbd"
    device.remove()


def test_a_device_in_use_is_not_detached(device: Device, tmp_path: Path) -> None:
    run("mkfs.ext4", "-q", "-F", device.path)
    run("mount", device.path, tmp_path)
    refused = device.cluster.cli("device", "stop", device.name)
    assert refused.returncode == ConflictError.exit_code
    assert str(tmp_path) in refused.stderr
    (tmp_path / "still").write_text("here")
    run("umount", tmp_path)
    run("e2fsck", "-f", "-n", device.path)


@pytest.mark.full
def test_a_slow_process_loses_connections_and_no_byte(device: Device) -> None:
    """Stopped for longer than the kernel waits: what it has received is sent again."""
    load = ("--iodepth=32", "--rw=randrw", "--bs=4k", "--size=12m")
    moved = device.status["stats"]["write_requests"]
    gave_up = run("dmesg").count("timed out")
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(fio, device.path, *load, *VERIFY)
        until(lambda: device.status["stats"]["write_requests"] > moved + 500, "load")
        pid = device.send(signal.SIGSTOP)  # which cannot be asked for while it stands still
        try:
            until(lambda: run("dmesg").count("timed out") > gave_up, "the kernel's patience to end")
        finally:
            os.kill(pid, signal.SIGCONT)
        verified.result(4 * WAIT_S)
    until(lambda: "answers may now take" in device.log, "connections that are replaced")
    status = device.status
    assert status["stats"]["requests_failed"] == 0
    assert not status["alarms"]
