# SPDX-License-Identifier: Apache-2.0
"""Where a backup may lie: every refusal names the thing and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.machine.made_host import make_files

from infiniswap.errors import BackupError
from infiniswap.system import backup
from infiniswap.units import MIB, PIB


class Host:
    """A file system of some type at `tmp_path`, as /proc tells of it."""

    def __init__(self, tmp_path: Path, fs_type: str = "ext4", options: str = "rw") -> None:
        self.proc, self.disk = tmp_path / "proc", tmp_path / "disk"
        self.sys = make_files(tmp_path / "sys", {"dev/block/9:9/dev": "9:9"})
        (self.proc / "self").mkdir(parents=True)
        self.disk.mkdir()
        (self.proc / "self" / "mountinfo").write_text(
            "1 0 254:0 / / rw - ext4 /dev/vda rw\n"
            f"2 1 9:9 / {self.disk} {options} - {fs_type} x rw\n"
        )
        self.swaps()

    def swaps(self, *paths: Path) -> None:
        lines = [f"{path} file 8 0 3" for path in paths]
        (self.proc / "swaps").write_text("\n".join(["Filename Type Size Used Priority", *lines]))

    def check(self, path: Path, size_bytes: int = MIB) -> backup.BackupTarget:
        return backup.check_backup(path, size_bytes, proc=self.proc, sys=self.sys)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("fs_type", ["ext4", "xfs", "ext3", "vfat", "jfs"])
def test_a_local_disk_is_accepted(tmp_path: Path, fs_type: str) -> None:
    host = Host(tmp_path, fs_type)
    path = host.disk / "x.backup"
    assert host.check(path) == backup.BackupTarget(path, is_block_device=False, exists=False)
    path.write_bytes(b"old")
    assert host.check(path).exists
    assert path.read_bytes() == b"old"


REFUSED = {
    "memory": ("tmpfs", "ramfs"),
    "network": ("nfs4", "cifs", "9p", "ceph", "virtiofs"),
    "another process": ("fuse.sshfs", "fuse", "fuseblk"),
    "layered": ("overlay",),
    "copy-on-write": ("btrfs", "zfs", "bcachefs"),
    "read-only": ("squashfs",),
    "no files of ours": ("sysfs",),
}


@pytest.mark.parametrize(
    ("fs_type", "why"), [(fs_type, why) for why, types in REFUSED.items() for fs_type in types]
)
def test_other_file_systems_are_refused(tmp_path: Path, fs_type: str, why: str) -> None:
    host = Host(tmp_path, fs_type)
    with pytest.raises(BackupError, match=why) as caught:
        host.check(host.disk / "x.backup")
    assert fs_type in str(caught.value)
    assert str(host.disk) in str(caught.value)
    assert "--backup" in str(caught.value)


def test_a_host_of_btrfs_alone_is_told_what_it_can_do(tmp_path: Path) -> None:
    host = Host(tmp_path, "btrfs")
    with pytest.raises(BackupError, match=r"needs a partition.*--backup none: pages are .* lost"):
        host.check(host.disk / "x.backup")


def test_a_link_to_a_refused_file_system_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path, "tmpfs")
    (tmp_path / "link").symlink_to(host.disk)
    with pytest.raises(BackupError, match="memory"):
        host.check(tmp_path / "link" / "x")


@pytest.mark.parametrize("target", ["empty", "absent"])
def test_a_link_is_no_backup(host: Host, target: str) -> None:
    (host.disk / "empty").touch(mode=0o600)
    link = host.disk / "link"
    link.symlink_to(target)
    with pytest.raises(BackupError, match="symbolic link") as caught:
        host.check(link)
    assert str(link) in str(caught.value)
    assert not (host.disk / "absent").exists()


def test_a_backup_in_a_directory_that_everybody_may_write_to_is_refused(host: Host) -> None:
    host.disk.chmod(0o777)
    for name in ("absent", "empty"):
        with pytest.raises(BackupError, match="0777"):
            host.check(host.disk / name)
        (host.disk / "empty").touch(mode=0o600)
    host.disk.chmod(0o1777)
    assert host.check(host.disk / "empty").exists


@pytest.mark.parametrize("mode", [0o666, 0o604, 0o640, 0o620])
def test_a_backup_that_other_users_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "x"
    path.touch()
    path.chmod(mode)
    with pytest.raises(
        BackupError, match=f"other users may read or write it .mode {mode:04o}"
    ) as e:
        backup.check_private(path, is_ours=False)
    # It may be anything: nobody is told to take others' rights to it away.
    assert "chmod" not in str(e.value)
    with pytest.raises(BackupError, match="chmod go= "):
        backup.check_private(path, is_ours=True)
    path.chmod(0o600)
    backup.check_private(path, is_ours=False)


@pytest.mark.requires_root
def test_a_backup_of_another_name_or_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch(mode=0o600)
    os.link(path, tmp_path / "y")
    with pytest.raises(BackupError, match="has 2 names"):
        backup.check_private(path, is_ours=False)
    os.chown(path, 65_534, 65_534)
    with pytest.raises(BackupError, match="another user"):
        backup.check_private(path, is_ours=False)


def test_a_full_disk_is_refused_with_both_figures(host: Host) -> None:
    with pytest.raises(BackupError, match=r"needs .*8.*PiB and only .* are free"):
        host.check(host.disk / "x", 8192 * PIB)


def test_what_the_file_has_already_is_not_needed_again(host: Host) -> None:
    path = host.disk / "x"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    assert host.check(path, 2 * MIB).exists


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path, options="ro,relatime")
    with pytest.raises(BackupError, match=r"(?s)read-only.*remount"):
        host.check(host.disk / "x")


def test_things_that_are_no_files_are_refused(host: Host) -> None:
    for path in (host.disk, Path("/dev/null")):
        with pytest.raises(BackupError, match="neither a regular file nor a block device"):
            host.check(path)


def test_a_missing_directory_is_named(host: Host) -> None:
    with pytest.raises(BackupError, match="mkdir -p"):
        host.check(host.disk / "absent" / "x")
    (host.disk / "file").write_text("")
    with pytest.raises(BackupError):
        host.check(host.disk / "file" / "x")


def test_an_active_swap_file_is_refused(host: Host) -> None:
    path, other = host.disk / "swap", host.disk / "other"
    path.write_text("")
    other.write_text("")
    host.swaps(path, host.disk / "gone")
    with pytest.raises(BackupError, match="swapoff"):
        host.check(path)
    host.check(other)
    os.link(path, host.disk / "same")
    with pytest.raises(BackupError, match="swapoff"):
        host.check(host.disk / "same")


@pytest.mark.requires_unprivileged
def test_a_directory_of_somebody_else_is_refused(host: Host) -> None:
    host.disk.chmod(0o500)
    with pytest.raises(BackupError, match="may not write"):
        host.check(host.disk / "x")
