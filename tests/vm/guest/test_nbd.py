# SPDX-License-Identifier: Apache-2.0
"""The front end nbd on real kernels: what is attached, left, and left alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster

from infiniswap.device.frontends import clear_leftovers
from infiniswap.device.frontends.nbd import NbdKernel, find_left
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.protocol import EngineConfig
from infiniswap.errors import ConflictError, NotFoundError, SystemCallError
from infiniswap.system import nbd
from infiniswap.system.genl import GenericNetlink
from infiniswap.units import MIB

pytestmark = [pytest.mark.kernels("6.12", "6.1"), pytest.mark.usefixtures("nbd_driver")]

SIZE = 128 * MIB


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    backup = Path("/var/tmp/nbd-backup")
    with NativeEngine(EngineConfig(size_bytes=SIZE, slab_bytes=SIZE), str(backup)) as engine:
        yield engine
    backup.unlink()


@pytest.fixture
def paths(tmp_path: Path) -> DevicePaths:
    return DevicePaths(tmp_path.name, tmp_path, tmp_path)


def test_attached_again_and_again_it_leaves_nothing(
    engine: NativeEngine, paths: DevicePaths, count: Callable[[int, int], int]
) -> None:
    device = NbdKernel(paths)

    def held() -> tuple[int, int, int]:
        ours = Path("/proc/self")
        blocks = [entry for entry in Path("/sys/block").iterdir() if entry.name.startswith("nbd")]
        return len(list((ours / "fd").iterdir())), len(list((ours / "task").iterdir())), len(blocks)

    before = held()
    for _ in range(count(10, 50)):
        device.attach(engine)
        assert len(find_left(paths)) == 1
        device.detach()
        assert not nbd.devices()
    assert held() == before


def test_a_strangers_device_is_left_alone(engine: NativeEngine, paths: DevicePaths) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, GenericNetlink() as link:
        index = nbd.connect(
            link, [theirs.fileno()], size_bytes=SIZE, identifier="infiniswap:1:/elsewhere"
        )
        try:
            device = NbdKernel(paths)
            with pytest.raises(NotFoundError):
                device.prepare(engine, b"")
            with pytest.raises(SystemCallError):
                nbd.reconnect(link, index, ours.fileno(), identifier="another", timeout_s=5)
            device.attach(engine)
            assert device.block_device != Path(f"/dev/nbd{index}")
            device.detach()
            assert nbd.device(index) is not None
        finally:
            ours.close()
            nbd.disconnect(link, index)
    nbd.wait_free(index, timeout_s=WAIT_S)


def test_a_device_that_is_open_exclusively_stays(engine: NativeEngine, paths: DevicePaths) -> None:
    device = NbdKernel(paths)
    device.attach(engine)
    assert device.block_device is not None
    with device.block_device.open("rb", buffering=0) as file:
        exclusive = os.open(device.block_device, os.O_RDONLY | os.O_EXCL)
        with pytest.raises(ConflictError, match="in use"):
            device.detach()
        assert file.read(4096) == bytes(4096)
        os.close(exclusive)
    device.detach()
    assert not nbd.devices()


@pytest.mark.full  # minutes, as each process of a device takes its time here
def test_what_a_dead_process_left_is_taken_away(module_cluster: Cluster) -> None:
    """Although nobody has ever opened it."""
    device = module_cluster.start("--frontend", "nbd", size="16M")
    device.kill()
    paths = DevicePaths(device.name, device.run, module_cluster.backup_dir)
    ((left, _),) = find_left(paths)
    holder = os.open(left.path, os.O_RDONLY | os.O_EXCL)  # open, and nobody reads
    with pytest.raises(ConflictError):
        clear_leftovers(paths)
    os.close(holder)
    device.remove()
    assert not nbd.devices()
