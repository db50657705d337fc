# SPDX-License-Identifier: Apache-2.0
"""What a device leaves on its disk once it is removed: the blocks that its files had."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import Cluster, Device, run
from support.devices.nbd_client import connected

from infiniswap.engine.native_seal import NativeSealKeys
from infiniswap.errors import EngineError
from infiniswap.secret import read_host_key
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_loop,
    pytest.mark.requires_tool("mkfs.ext4", "mount", "umount"),
]

PAGES = 256
MARKER_BYTES = 32
SEALED_KEY_BYTES = 60


class SmallDisk:
    """A file system for backups in a file, all of whose blocks can be looked at."""

    def __init__(self, cluster: Cluster) -> None:
        self._image = cluster.root / "image"
        self._point = cluster.backup_dir
        self._point.mkdir(mode=0o700)
        with self._image.open("wb") as file:
            file.truncate(128 * MIB)
        run("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", self._image)
        with self._image.open("r+b") as file:  # now, as mkfs makes holes where zeros are
            os.posix_fallocate(file.fileno(), 0, 128 * MIB)
        self._mount()

    def _mount(self) -> None:
        run("mount", "-o", "loop", self._image, self._point)

    def blocks(self) -> bytes:
        """All of them, used and free, as they lie there without the kernel's cache."""
        run("umount", self._point)
        try:
            return self._image.read_bytes()
        finally:
            self._mount()

    def end(self) -> None:
        run("umount", self._point)


@pytest.fixture
def disk(cluster: Cluster) -> Iterator[SmallDisk]:
    cluster.donor()
    small = SmallDisk(cluster)
    yield small
    small.end()


def stopped(cluster: Cluster, marker: bytes, seal: str) -> Device:
    """A device whose every page has the marker, kept over two stops."""
    device = cluster.start(
        "--frontend", "nbd-socket", size=str(PAGES * PAGE_BYTES), INFINISWAP_DEVICE_SEAL=seal
    )
    with connected(device.socket) as client:
        for number in range(PAGES):
            page = marker * (PAGE_BYTES // len(marker))
            assert nbd.write(client, number * PAGE_BYTES, page) == 0
        nbd.say(client, nbd.request(nbd.DISC))
    device.stop()
    cluster.ok("device", "start", device.name)
    device.stop()
    return device


def test_freed_blocks_hold_no_page_that_can_be_opened(cluster: Cluster, disk: SmallDisk) -> None:
    marker = os.urandom(MARKER_BYTES)
    device = stopped(cluster, marker, "true")
    backup = device.backup.read_bytes()
    some = [backup[at : at + PAGE_BYTES] for at in range(0, len(backup), PAGE_BYTES * 16)]
    keys = NativeSealKeys()
    host_key = read_host_key(cluster.backup_dir / "host-key")
    assert len(find_keys(disk.blocks(), keys, host_key)) == 1  # that of the stopped device
    device.remove()
    blocks = disk.blocks()
    # What was sealed is still there, and whoever has the host's key as well finds no key for it.
    assert sum(page in blocks for page in some) > len(some) // 2
    assert marker not in blocks
    assert find_keys(blocks, keys, host_key) == []


def find_keys(blocks: bytes, keys: NativeSealKeys, host_key: bytearray) -> list[int]:
    """Where keys of devices lie that the host's key opens: files begin with blocks."""
    found = []
    for at in range(0, len(blocks), 1024):
        sealed = blocks[at : at + SEALED_KEY_BYTES]
        if not any(sealed):
            continue
        try:
            os.close(keys.load(sealed, host_key))
        except EngineError:
            continue
        found.append(at)
    return found


def test_without_a_seal_freed_blocks_hold_everything(cluster: Cluster, disk: SmallDisk) -> None:
    """So the test above can fail."""
    marker = os.urandom(MARKER_BYTES)
    stopped(cluster, marker, "false").remove()
    assert marker in disk.blocks()
