# SPDX-License-Identifier: Apache-2.0
"""Loop devices and swap areas of the real kernel, over a plain file."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniswap.errors import BackupError, ConflictError
from infiniswap.system import backup, loop, mounts, swap, throttle
from infiniswap.system.files import read_text
from infiniswap.system.programs import run_command
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_loop, pytest.mark.requires_tool("losetup")]

SIZE_BYTES = 32 * MIB


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing file"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
    if mounts.mount_of(path).fs_type in ("tmpfs", "overlay"):
        pytest.skip("needs a temporary directory on a disk (direct I/O)")
    return path


@pytest.fixture
def device(backing: Path) -> Iterator[loop.LoopDevice]:
    attached = loop.attach(backing)
    try:
        yield attached
    finally:
        swap.swapoff(attached.path, timeout_s=30)
        loop.detach(attached)


def _queue(device: loop.LoopDevice, name: str) -> str:
    return (Path("/sys/block") / device.path.name / "queue" / name).read_text().strip()


def test_it_is_attached_with_direct_io_and_pages_as_sectors(
    device: loop.LoopDevice, backing: Path
) -> None:
    assert device.direct_io
    assert not device.autoclear
    assert device.backing == str(backing)
    assert loop.size_bytes(device) == SIZE_BYTES
    assert _queue(device, "logical_block_size") == "4096"
    assert loop.find_by_backing(backing) == (device,)


def test_the_queue_is_tuned(device: loop.LoopDevice) -> None:
    refused = loop.tune(device)
    for name, value in loop.QUEUE_SETTINGS:
        if name not in refused:
            assert _queue(device, name) == value or f"[{value}]" in _queue(device, name)
    # The first is what keeps requests within the front end's limit: it must never be refused.
    assert "max_sectors_kb" not in refused


def test_what_comes_after_us_has_the_kernels_own_throttling(backing: Path) -> None:
    device = loop.attach(backing)
    refused = loop.tune(device)
    if "wbt_lat_usec" in refused:
        loop.detach(device)
        pytest.skip("this kernel holds no writes back (CONFIG_BLK_WBT)")
    assert _queue(device, "wbt_lat_usec") == "0"
    loop.detach(device)
    now = _queue(device, "wbt_lat_usec")
    assert now != "0" or loop.loop_device(device.number) is not None  # somebody else has it


def test_detaching_twice_is_fine(backing: Path) -> None:
    device = loop.attach(backing)
    loop.detach(device)
    assert loop.find_by_backing(backing) == ()
    loop.detach(device)


def test_a_device_that_somebody_has_open_is_a_conflict(device: loop.LoopDevice) -> None:
    descriptor = os.open(device.path, os.O_RDONLY)
    try:
        with pytest.raises(ConflictError, match=r"in use.*lsblk"):
            loop.detach(device, timeout_s=0.3)
    finally:
        os.close(descriptor)


def test_a_refused_detach_does_not_happen_later(device: loop.LoopDevice, backing: Path) -> None:
    upper = loop.attach(device.path)  # no process has the lower one open
    try:
        with pytest.raises(ConflictError):
            loop.detach(device, timeout_s=0.3)
    finally:
        loop.detach(upper)
    (now,) = loop.find_by_backing(backing)
    assert now.is_attachment(device)
    assert not now.autoclear
    assert now.direct_io


def test_the_file_below_is_known_by_its_inode(device: loop.LoopDevice, backing: Path) -> None:
    assert loop.is_on(device, backing.stat())
    other = backing.rename(backing.with_name("other"))
    backing.touch()
    assert not loop.is_on(device, backing.stat())
    other.replace(backing)
    upper = loop.attach(device.path)
    try:
        assert loop.is_on(upper, device.path.stat())
        assert not loop.is_on(upper, upper.path.stat())
    finally:
        loop.detach(upper)


@pytest.mark.requires_swap
def test_a_swap_area_from_beginning_to_end(device: loop.LoopDevice) -> None:
    swap.mkswap(device.path, label="isw-test")
    priority = swap.priority_above(swap.active_areas())
    swap.swapon(device.path, priority=priority, discard=True)
    area = swap.find_area(device.path)
    assert area is not None
    assert area.priority == priority
    assert area.size_bytes == SIZE_BYTES - 4096
    assert all(other.priority < priority for other in swap.active_areas() if other != area)
    assert swap.swapoff_fits(device.path).fits
    with pytest.raises(ConflictError, match="already"):
        swap.swapon(device.path, priority=priority, discard=False)
    with pytest.raises(BackupError, match="swapoff"):
        backup.check_backup(device.path, SIZE_BYTES)
    swap.swapoff(device.path, timeout_s=30)
    assert swap.find_area(device.path) is None


def test_a_block_device_as_backup(device: loop.LoopDevice, tmp_path: Path) -> None:
    target = backup.check_backup(device.path, SIZE_BYTES)
    assert target.is_block_device
    with pytest.raises(BackupError, match=r"the device has 32\.0 MiB"):
        backup.check_backup(device.path, SIZE_BYTES + 4096)
    link = tmp_path / "link"
    link.symlink_to(device.path)
    assert backup.check_backup(link, SIZE_BYTES).path == device.path


@pytest.mark.requires_tool("mkfs.ext4")
def test_a_mounted_block_device_is_no_backup(device: loop.LoopDevice, tmp_path: Path) -> None:
    run_command(["mkfs.ext4", "-q", "-E", "nodiscard", str(device.path)])
    point = tmp_path / "mnt"
    point.mkdir()
    run_command(["mount", str(device.path), str(point)])
    try:
        with pytest.raises(BackupError, match="is mounted at") as caught:
            backup.check_backup(device.path, SIZE_BYTES)
        assert str(point) in str(caught.value)
        with pytest.raises(BackupError, match=r"needs .* and only"):
            backup.check_backup(point / "file", SIZE_BYTES)
    finally:
        mounts.unmount(point, lazy=True)


@pytest.mark.requires_tool("mkfs.ext4", "blkid", "wipefs")
def test_a_block_device_with_data_is_no_backup(device: loop.LoopDevice) -> None:
    backup.check_has_no_data(device.path)
    run_command(["mkfs.ext4", "-q", str(device.path)])
    with pytest.raises(BackupError, match=r"holds ext4.*Name another"):
        backup.check_has_no_data(device.path)
    run_command(["wipefs", "--all", str(device.path)])
    backup.check_has_no_data(device.path)
    entry = struct.pack("<B3sB3sII", 0, b"\0" * 3, 0x83, b"\0" * 3, 2048, 4096)
    device.path.write_bytes(bytes(446) + entry + bytes(48) + b"\x55\xaa")
    with pytest.raises(BackupError, match=r"partition table \(dos\)"):
        backup.check_has_no_data(device.path)
    run_command(["wipefs", "--all", str(device.path)])
    swap.mkswap(device.path, label="home")
    with pytest.raises(BackupError, match="holds swap"):
        backup.check_has_no_data(device.path)
    # What our own swap devices leave on their backups.
    swap.mkswap(device.path, label="isw-name")
    backup.check_has_no_data(device.path)


def test_a_read_only_block_device_is_no_backup(device: loop.LoopDevice) -> None:
    run_command(["blockdev", "--setro", str(device.path)])
    try:
        with pytest.raises(BackupError, match="read-only"):
            backup.check_backup(device.path, SIZE_BYTES)
    finally:
        run_command(["blockdev", "--setrw", str(device.path)])


def test_what_an_earlier_user_left_read_only_is_writable_again(backing: Path) -> None:
    before = loop.attach(backing)
    run_command(["blockdev", "--setro", str(before.path)])
    loop.detach(before)
    device = loop.attach(backing)
    try:
        os.close(os.open(device.path, os.O_RDWR))
        with device.path.open("r+b") as file:
            file.write(b"x")
    finally:
        loop.detach(device)
        run_command(["blockdev", "--setrw", str(before.path)])


def test_a_throttled_device_is_limited_by_the_kernel(device: loop.LoopDevice) -> None:
    root = throttle.blkio_root()
    if root is None:
        pytest.skip("needs the block I/O controller of cgroup version 1")
    number = os.stat(device.path).st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    file = root / "blkio.throttle.read_bps_device"
    throttle.set_limits_v1(root, name, throttle.IoLimits(MIB, 2 * MIB, 300, 400))
    try:
        assert f"{name} {MIB}\n" in read_text(file, "read")
    finally:
        throttle.set_limits_v1(root, name, throttle.IoLimits())
    assert name not in read_text(file, "read")
