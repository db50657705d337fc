# SPDX-License-Identifier: Apache-2.0
"""What others do to a device: loop devices detached and taken, links, mounts, swap areas."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.devices.cluster import Cluster, Device, run, until

from infiniswap.device.spec import rundir
from infiniswap.device.spec.rundir import LINK_DIR
from infiniswap.system import loop, swap
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
]

PATTERN = b"infiniswap" * 410 + b"!" * 4092  # two pages


@pytest.fixture
def device(shared_cluster: Cluster) -> Iterator[Device]:
    device = shared_cluster.start("--frontend", "fuse")
    with device.path.open("r+b", buffering=0) as file:
        file.write(PATTERN)
        os.fsync(file.fileno())
    yield device
    assert "Traceback" not in device.log


def contents(device: Device) -> bytes:
    run("blockdev", "--flushbufs", device.path)
    with device.path.open("rb") as file:
        return file.read(len(PATTERN))


@contextlib.contextmanager
def another_at_its_number(device: Device, file: Path) -> Iterator[loop.LoopDevice]:
    """Somebody detaches the device and gives its number to that file."""
    file.write_bytes(b"another's" + bytes(8 * MIB))

    def taken() -> Path | None:
        path = device.path.resolve()
        try:
            run("losetup", "-d", path)
            run("losetup", path, file)
        except AssertionError:
            return None  # the device was faster
        return path

    path = until(taken, "a number to take")
    other = loop.loop_device(int(path.name.removeprefix("loop")))
    assert other is not None
    assert other.backing == str(file)
    try:
        yield other
    finally:
        if swap.find_area(path) is not None:
            run("swapoff", path)
        loop.detach(other)


def is_there(other: loop.LoopDevice) -> bool:
    now = loop.loop_device(other.number)
    return now is not None and now.is_attachment(other)


def test_a_link_never_leads_to_what_has_taken_the_number(device: Device, tmp_path: Path) -> None:
    with another_at_its_number(device, tmp_path / "another") as other:
        until(
            lambda: device.path.is_block_device() and device.path.resolve() != other.path,
            "another block device",
        )
        assert contents(device) == PATTERN
        status = device.status
        assert status["path"] == str(device.path.resolve())
        assert not status["alarms"]
        assert f"{other.path} was detached by somebody else" in device.log
        device.stop()
        assert is_there(other)
        with other.path.open("rb") as file:
            assert file.read(9) == b"another's"
    device.cluster.ok("device", "start", device.name)
    assert contents(device) == PATTERN


@pytest.mark.requires_swap
def test_a_stop_leaves_the_swap_area_that_has_taken_the_number(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    device = shared_cluster.start("--frontend", "fuse", "--swap")
    run("swapoff", device.path)
    with another_at_its_number(device, tmp_path / "another") as other:
        run("mkswap", other.path)
        run("swapon", "-p", "1", other.path)
        device.stop()
        assert swap.find_area(other.path) is not None
        assert is_there(other)


@pytest.mark.requires_swap
def test_a_swap_area_that_somebody_took_off_is_told_and_may_come_back(
    shared_cluster: Cluster,
) -> None:
    device = shared_cluster.start("--frontend", "fuse", "--swap")
    run("swapoff", device.path)
    (alarm,) = until(lambda: device.status["alarms"], "an alarm")
    assert "swap area was taken out of use by somebody else" in alarm
    assert not device.status["swap"]["active"]
    findings = json.loads(shared_cluster.cli("doctor", "--json").stdout)
    assert any(f"swapon --discard /dev/infiniswap/{device.name}" in f["mend"] for f in findings)
    run("swapon", "--discard", "-p", "5", device.path)
    until(lambda: not device.status["alarms"], "no alarm")
    assert device.status["swap"]["active"]
    assert device.status["swap"]["priority"] == 5
    device.stop()


def test_a_link_that_somebody_removed_is_put_back(device: Device) -> None:
    link = LINK_DIR / device.name
    before = link.readlink()
    link.unlink()
    until(link.is_symlink, "the link")
    link.unlink()
    link.symlink_to("/dev/null")
    until(lambda: link.readlink() == before, "the link")
    assert contents(device) == PATTERN
    assert "removed or changed by somebody else; it is put back" in device.log


def test_a_link_is_withdrawn_where_nothing_can_be_attached_again(device: Device) -> None:
    link = device.path
    number = link.resolve()
    run("umount", "-l", device.run / "mnt")
    assert contents(device) == PATTERN  # the loop device still has the file
    run("losetup", "-d", number)
    until(lambda: not link.is_symlink(), "no link")
    told = f"{number} was detached by somebody else"  # beside another alarm, of the mount
    until(lambda: any(told in alarm for alarm in device.status["alarms"]), "an alarm")
    device.stop()


def test_a_successor_finds_a_device_that_was_attached_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    device = cluster.start("--frontend", "fuse")
    if not device.status["succession"]:
        pytest.skip("this kernel and libfuse cannot hand a FUSE connection on")
    with device.path.open("r+b", buffering=0) as file:
        file.write(PATTERN)
    with another_at_its_number(device, tmp_path / "another") as other:
        until(
            lambda: device.path.is_block_device() and device.path.resolve() != other.path,
            "another block device",
        )
        device.wait_standby()
        device.kill()
        status = device.wait_take_over(1)
        assert status["path"] == str(device.path.resolve()) != str(other.path)
        assert contents(device) == PATTERN
        device.stop()
        assert is_there(other)


@contextlib.contextmanager
def loop_on(device: Device) -> Iterator[str]:
    """Somebody's loop device over the device."""
    upper = run("losetup", "--find", "--show", device.path.resolve()).strip()
    try:
        yield upper
    finally:
        run("losetup", "--detach", upper)


def test_a_stop_names_the_loop_device_that_is_on_it(device: Device) -> None:
    number = int(device.path.resolve().name.removeprefix("loop"))
    with loop_on(device) as upper:
        for what in ("stop", "remove"):
            done = device.command(what)
            assert done.returncode == 9, done.stderr
            assert f"the loop device {upper} lies on it" in done.stderr
            assert f"losetup --detach {upper}" in done.stderr
        now = loop.loop_device(number)
        assert now is not None
        assert not now.autoclear
    assert contents(device) == PATTERN
    assert not device.status["alarms"]
    assert "detached by somebody else" not in device.log
    device.stop()


@pytest.mark.requires_tool("mkfs.btrfs")
def test_a_stop_names_where_its_btrfs_is_mounted(device: Device, tmp_path: Path) -> None:
    run("mkfs.btrfs", "-q", "-f", device.path)
    run("mount", device.path, tmp_path)
    try:
        done = device.command("stop")
        assert done.returncode == 9
        assert f"mounted at {tmp_path}" in done.stderr
    finally:
        run("umount", tmp_path)
    device.stop()


def test_a_device_below_another_ones_backup_stays(shared_cluster: Cluster) -> None:
    device, name = shared_cluster.start("--frontend", "fuse"), shared_cluster.name()
    run_dir, store = shared_cluster.run_dir, shared_cluster.backup_dir
    spec = rundir.read_record(rundir.paths_of(device.name, run_dir, store))
    assert spec is not None
    # A device of before such a backup was refused, as it looks to others while it runs.
    upper = rundir.paths_of(name, run_dir, store)
    lock = rundir.take_lock(upper)
    backup = str(device.path)
    rundir.write_record(upper.record, msgspec.structs.replace(spec, name=name, backup=backup))
    try:
        with device.path.open("rb"):
            done = device.command("remove")
        assert done.returncode == 9, done.stderr
        assert f"the backup of device {name} lies on it" in done.stderr
        assert f"infiniswap device stop {name}" in done.stderr
        assert "open in" not in done.stderr
    finally:
        rundir.clear(upper)
        os.close(lock)
    device.remove()


def test_a_device_is_no_place_for_another_ones_backup(device: Device) -> None:
    done = device.cluster.cli(
        *("device", "start", device.cluster.name(), "--donors", device.cluster.addresses),
        *("--size", "8M", "--backup", str(device.path)),
    )
    assert done.returncode == 8, done.stderr
    assert "lies on an Infiniswap device" in done.stderr
