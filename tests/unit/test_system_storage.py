# SPDX-License-Identifier: Apache-2.0
"""What lies below a backup: the bottom decides, however many layers are between."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.machine.made_host import make_files

from infiniswap.errors import BackupError
from infiniswap.system import backup, mounts, storage
from infiniswap.units import MIB

LOOP = 1_000_000
"""No node in /dev has such a number."""


class Stack:
    """A /proc and a /sys in which block devices lie on each other."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys, self._root = root / "proc", root / "sys", root
        (self.proc / "self").mkdir(parents=True)
        self._table = self.proc / "self" / "mountinfo"
        self._table.write_text("")
        self.device("253:0", "vda")
        self.mount("/", "253:0", "ext4")

    def device(self, number: str, name: str, *below: str, **files: object) -> str:
        """A block device; files: of its directory, with __ for a slash. Returns its number."""
        node = make_files(self.sys / "block" / name, {"dev": number})
        make_files(node, {key.replace("__", "/"): text for key, text in files.items()})
        for lower in below:
            (node / "slaves").mkdir(exist_ok=True)
            link = self.sys / "dev" / "block" / lower
            (node / "slaves" / link.resolve().name).symlink_to(link.resolve())
        self._name(number, node)
        return number

    def partition(self, number: str, disk: str, name: str) -> str:
        node = make_files(self.sys / "block" / disk / name, {"dev": number, "partition": 1})
        self._name(number, node)
        return number

    def _name(self, number: str, node: Path) -> None:
        numbers = self.sys / "dev" / "block"
        numbers.mkdir(parents=True, exist_ok=True)
        (numbers / number).symlink_to(node)

    def mount(self, point: str | Path, number: str, fs_type: str) -> None:
        with self._table.open("a") as table:
            table.write(f"9 1 {number} / {point} rw - {fs_type} x rw\n")

    def disk(self, name: str, number: str, fs_type: str = "ext4") -> Path:
        """Where a file system on that device is mounted."""
        directory = self._root / name
        directory.mkdir()
        self.mount(directory, number, fs_type)
        return directory

    def file(self, directory: Path) -> Path:
        """One of 1 MiB whose blocks are all there."""
        path = directory / "image"
        path.write_bytes(b"x" * MIB)
        return path

    def loop(self, file: Path, name: str = f"loop{LOOP}", number: str = "7:9") -> str:
        return self.device(number, name, loop__backing_file=file)

    def refusal(self, number: str) -> str:
        """What is wrong with a block device, with the name of the layer."""
        layers = storage.below_device(number, proc=self.proc, sys=self.sys)
        return next((f"{layer.name} {layer.refusal}" for layer in layers if layer.refusal), "")


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


def test_disks_below_lvm_raid_and_partitions_hold_backups(stack: Stack) -> None:
    stack.device("8:0", "sda")
    stack.device("8:16", "sdb")
    parts = [stack.partition("8:1", "sda", "sda1"), stack.partition("8:17", "sdb", "sdb1")]
    raid = stack.device("9:0", "md0", *parts)
    volume = stack.device("252:0", "dm-0", raid, dm__uuid="LVM-abcdef")
    crypt = stack.device("252:1", "dm-1", volume, dm__uuid="CRYPT-LUKS2-x")
    assert stack.refusal(crypt) == ""
    names = [layer.name for layer in storage.below_device(crypt, proc=stack.proc, sys=stack.sys)]
    assert set(names) == {"/dev/dm-1", "/dev/dm-0", "/dev/md0"} | {
        f"/dev/{name}" for name in ("sda1", "sda", "sdb1", "sdb")
    }
    assert stack.refusal(stack.loop(stack.file(stack.disk("there", crypt)))) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("zram0", "the very memory that swapping is to free"),
        ("ram3", "the very memory that swapping is to free"),
        ("nbd0", "served by another process or host"),
        ("ublkb1", "served by another process or host"),
        ("rbd0", "on the network"),
        ("drbd2", "another host"),
        ("dm-7", "no disk"),
        ("md4", "no disk"),
    ],
)
def test_one_such_device_at_the_bottom_is_enough(stack: Stack, name: str, why: str) -> None:
    bottom = stack.device("250:0", name)
    raid = stack.device("9:0", "md0", "253:0", bottom)
    volume = stack.device("252:0", "dm-0", raid, dm__uuid="LVM-abcdef")
    loop = stack.loop(stack.file(stack.disk("there", volume)))
    for number in (bottom, volume, loop):
        assert f"/dev/{name} " in stack.refusal(number)
        assert why in stack.refusal(number)


@pytest.mark.parametrize(
    ("fs_type", "why"),
    [
        ("tmpfs", "memory"),
        ("nfs4", "network"),
        ("btrfs", "copy-on-write"),
        (mounts.FUSE_TYPE, "an Infiniswap device"),
        ("fuse.sshfs", "another process"),
        ("vmhgfs", "without a disk of its own"),
    ],
)
def test_the_file_below_a_loop_device_is_judged(stack: Stack, fs_type: str, why: str) -> None:
    file = stack.file(stack.disk("there", "0:44", fs_type))
    upper = stack.device("252:0", "dm-0", stack.loop(file))
    for number in ("7:9", upper):
        assert stack.refusal(number).startswith(str(file))
        assert why in stack.refusal(number)


def test_blocks_beyond_a_files_end_are_no_room_for_it(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.touch()
    os.truncate(file, 2 * MIB)
    subprocess.run(
        ["fallocate", "--keep-size", "--offset", str(2 * MIB), "--length", str(2 * MIB), file],
        check=True,
    )
    assert "2.00 MiB of it have no room" in stack.refusal(stack.loop(file))


def test_blocks_that_were_reserved_and_not_written_are_room(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "image"
    with file.open("wb") as image:
        os.posix_fallocate(image.fileno(), 0, 2 * MIB)
    assert stack.refusal(stack.loop(file)) == ""


def test_a_loop_device_over_a_sparse_file_is_refused(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "image"
    with file.open("wb") as image:
        image.write(bytes(MIB))
        image.truncate(3 * MIB)
    assert "2.00 MiB of it have no room" in stack.refusal(stack.loop(file))
    (layer,) = (
        layer
        for layer in storage.below_device("7:9", proc=stack.proc, sys=stack.sys)
        if layer.refusal
    )
    assert f"fallocate --length {3 * MIB} {file}" in layer.mend


def test_a_loop_device_over_what_cannot_be_seen_is_refused(stack: Stack, tmp_path: Path) -> None:
    assert "not visible" in stack.refusal(stack.loop(tmp_path / "absent"))
    file = stack.file(tmp_path)
    stack.loop(Path(f"{file} (deleted)"), f"loop{LOOP + 1}", "7:10")
    assert "deleted" in stack.refusal("7:10")
    stack.device("7:11", f"loop{LOOP + 2}")
    assert "no file" in stack.refusal("7:11")


@pytest.mark.parametrize(
    "uuid", ["LVM-abc-tpool", "LVM-abc-vpool", "LVM-abc-cow", "stratis-1-private-x-thin-pool"]
)
def test_what_gives_out_its_room_at_a_write_is_refused(stack: Stack, uuid: str) -> None:
    pool = stack.device("252:4", "dm-4", "253:0", dm__uuid=uuid)
    assert "at the first write" in stack.refusal(
        stack.device("252:5", "dm-5", pool, dm__uuid="LVM-abc")
    )


def test_what_the_kernel_does_not_show_is_refused(stack: Stack) -> None:
    assert "not in" in stack.refusal("8:77")


def test_devices_that_lie_on_each_other_end(stack: Stack) -> None:
    one = stack.device("252:0", "dm-0", "253:0")
    two = stack.device("252:1", "dm-1", one)
    slaves = stack.sys / "block" / "dm-0" / "slaves"
    (slaves / "dm-1").symlink_to(stack.sys / "block" / "dm-1")
    assert stack.refusal(two) == ""


def test_a_file_backup_is_judged_by_the_disk_below(stack: Stack) -> None:
    stack.device("250:0", "zram0")
    (stack.proc / "swaps").write_text("")
    point = stack.disk("there", "250:0")
    with pytest.raises(BackupError, match=r"it lies on /dev/zram0, which is the very memory"):
        backup.check_backup(point / "x", MIB, proc=stack.proc, sys=stack.sys)
