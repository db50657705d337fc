# SPDX-License-Identifier: Apache-2.0
"""A device that keeps its contents, started more often than there is room for keys of starts.

Most starts are made in this process, on the files of a device, in the order in which the device's
process makes them. The engine alone: tests/c/test_seal_starts.c.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import Cluster, Device
from support.devices.nbd_client import connected

from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.device_key import DeviceKey
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.protocol import Engine, EngineConfig, FrontendConfig
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = pytest.mark.requires_native

KEYS = 64
"""Places for keys of starts."""
STARTS = 70
WRITTEN = 2
"""Pages that each start writes, and no later one."""
_HEADER_BYTES, _SALT_BYTES = 32, 12


class Kept:
    """The files of a stopped device, and what its pages hold.

    Attributes:
        pages: by their number; None: reading it is an error.
    """

    def __init__(self, device: Device) -> None:
        self.paths = rundir.paths_of(device.name, device.run.parent, device.backup.parent)
        spec = rundir.read_kept(self.paths)
        assert spec is not None
        self._spec = spec
        self.pages: dict[int, bytes | None] = {}

    @contextmanager
    def _engine(self, key: DeviceKey) -> Iterator[Engine]:
        config = EngineConfig(
            size_bytes=self._spec.size_bytes,
            slab_bytes=self._spec.config.device.slab_bytes,
            staging_pages=256,
            requests_max=8,
            seal_key_fd=key.fd,
        )
        with NativeEngine(config, self._spec.backup) as engine:
            yield engine

    def start(self, directory: Path) -> int:
        """Starts it, compares its pages, writes further ones and stops it. How many were lost."""
        key = DeviceKey()
        key.begin(self.paths, self._spec)
        try:
            with self._engine(key) as engine:
                contents.load(engine, self.paths, self._spec)
                contents.begin(self.paths, self._spec)
                key.keep(self.paths, self._spec)
                lost = contents.renew_seals(engine, self._spec)
                path = directory / "socket"
                frontend = engine.frontend("nbd-socket", FrontendConfig(path=str(path)))
                self.compare(path)
                self._write(path)
                frontend.close()
                path.unlink(missing_ok=True)
                contents.save(engine, self.paths, self._spec)
        finally:
            key.forget()
        return lost

    def compare(self, path: Path) -> None:
        """Every page that was ever written."""
        with connected(path) as client:
            for number, page in self.pages.items():
                found = nbd.read(client, number * PAGE_BYTES, PAGE_BYTES)
                assert found == (errno.EIO if page is None else page), number
            nbd.say(client, nbd.request(nbd.DISC))

    def _write(self, path: Path) -> None:
        first = len(self.pages)
        with connected(path) as client:
            for number in range(first, first + WRITTEN):
                page = os.urandom(PAGE_BYTES)
                assert nbd.write(client, number * PAGE_BYTES, page) == 0
                self.pages[number] = page
            nbd.say(client, nbd.request(nbd.DISC))

    def damage(self, number: int) -> None:
        """One bit of a page, in the only copy."""
        with Path(str(self._spec.backup)).open("r+b") as backup:
            backup.seek(number * PAGE_BYTES)
            byte = backup.read(1)[0] ^ 1
            backup.seek(number * PAGE_BYTES)
            backup.write(bytes([byte]))
        self.pages[number] = None

    @property
    def keys(self) -> int:
        """Of how many starts the saved tables have keys."""
        with self.paths.tables.open("rb") as tables:
            tables.seek(_HEADER_BYTES + _SALT_BYTES)
            return sum(struct.unpack(f"<{KEYS}I", tables.read(4 * KEYS)))


@pytest.fixture
def kept(shared_cluster: Cluster) -> Kept:
    device = shared_cluster.start("--frontend", "nbd-socket", size=str(8 * MIB))
    device.stop()
    return Kept(device)


def test_pages_of_every_start_are_there(kept: Kept, tmp_path: Path) -> None:
    for start in range(1, STARTS + 1):
        assert kept.start(tmp_path) == 0
        assert kept.keys == min(start, KEYS - 1)


def test_a_damaged_page_stops_no_start(kept: Kept, shared_cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(KEYS - 1):
        assert kept.start(tmp_path) == 0
    kept.damage(0)
    # From here on each start has to make room.
    name = kept.paths.name
    done = shared_cluster.cli("device", "start", name)
    assert done.returncode == 0, done.stderr
    sentence = "pages of the backup that were altered or damaged are lost: 1"
    assert sentence in done.stderr
    device = Device(shared_cluster, name)
    assert sentence in device.log
    assert "page 0 came back from the backup with other bytes" in device.status["alarms"]
    kept.compare(device.socket)
    device.stop()
    assert kept.keys == KEYS - 1
    for _ in range(STARTS - KEYS):
        assert kept.start(tmp_path) == 0
    assert kept.keys == KEYS - 1
