# SPDX-License-Identifier: Apache-2.0
"""What a flush promises, seen at the backup: its file system is frozen, so nothing gets there."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, run, until
from support.machine.small_disk import small_disk

from infiniswap.units import MIB, PAGE_BYTES

SIZE = 32 * MIB
DISK_MIB = 192
"""Some of it is left free beside a new backup."""
PLAIN, FORCED, LATER = (number * PAGE_BYTES for number in (1, 3, 5))


@pytest.fixture
def disk(module_cluster: Cluster) -> Iterator[Path]:
    """An ext4 of the test's own, so that freezing it harms nobody else."""
    with small_disk(module_cluster.root, DISK_MIB, "-b", "4096") as point:
        yield point


@pytest.fixture
def device(frontend: str, module_cluster: Cluster, disk: Path) -> Iterator[Device]:
    options = ("--frontend", frontend, "--backup", str(disk / "backup"))
    # Not sealed: what the backup has is compared.
    device = module_cluster.start(*options, size=f"{SIZE}", INFINISWAP_DEVICE_SEAL="false")
    try:
        yield device
    finally:
        device.remove()


@contextlib.contextmanager
def frozen(path: Path) -> Iterator[None]:
    """Thaws it in any case: nobody who waits for such a disk can be killed."""
    try:
        run("fsfreeze", "-f", path)
        yield
    finally:
        run("fsfreeze", "-u", path)


def write(fd: int, offset: int, fill: int, flags: int = 0) -> None:
    """A page, past the kernel's cache."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        page[:] = bytes([fill]) * PAGE_BYTES
        assert os.pwritev(fd, [page], offset, flags) == PAGE_BYTES


@pytest.mark.full  # a device's start takes 20 s here
@pytest.mark.parametrize("frontend", ["ublk", "nbd"], indirect=True)
def test_a_flush_waits_for_the_backup_and_a_plain_write_does_not(
    device: Device, disk: Path
) -> None:
    fd = os.open(device.path, os.O_RDWR | os.O_DIRECT)

    def stat(name: str) -> int:
        return int(device.status["stats"][name])

    def is_written_to_a_donor() -> bool:
        before = stat("pages_out_remote")
        write(fd, PLAIN, 1)
        return stat("pages_out_remote") > before

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        until(is_written_to_a_donor, "a slab with a donor")
        until(lambda: stat("staging_pages_used") == 0, "a backup that has everything")
        on_backup, flushes = stat("pages_out_backup"), stat("flush_requests")
        pool = stack.enter_context(ThreadPoolExecutor(3))  # which waits for its threads: after thaw
        with frozen(disk):
            pool.submit(write, fd, PLAIN, 2).result(WAIT_S)
            until(lambda: stat("requests_in_flight") == 0, "the front end to notice")
            forced = pool.submit(write, fd, FORCED, 3, os.RWF_DSYNC)
            until(lambda: stat("requests_in_flight") == 1, "a write with forced unit access")
            flushed = pool.submit(os.fsync, fd)
            until(lambda: stat("flush_requests") > flushes, "the flush to arrive")
            # What comes after it passes it, and it is still there (nbd may have sent it again).
            pool.submit(write, fd, LATER, 4).result(WAIT_S)
            assert stat("requests_in_flight") >= 2
            assert stat("pages_out_backup") == on_backup
            assert not forced.done()
            assert not flushed.done()
        forced.result(WAIT_S)
        flushed.result(WAIT_S)
    with (disk / "backup").open("rb") as backup:
        for offset, fill in ((PLAIN, 2), (FORCED, 3)):
            backup.seek(offset)
            assert backup.read(PAGE_BYTES) == bytes([fill]) * PAGE_BYTES
    assert stat("requests_failed") == 0
