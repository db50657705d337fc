# SPDX-License-Identifier: Apache-2.0
"""The mount table: parsing, and which mount a path lies on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.made_host import make_files

from infiniswap.errors import NotPermittedError, SystemCallError
from infiniswap.system import mounts
from infiniswap.system.block import number_text
from infiniswap.system.files import unescape


def _escape(text: str) -> str:
    """What the kernel does to paths (fs/proc_namespace.c: blank, tab, newline, backslash)."""
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\#" else char for char in text)


def _line(point: str, fs_type: str = "ext4", *, options: str = "rw,relatime", opt: str = "") -> str:
    return f"36 35 98:0 / {_escape(point)} {options} {opt}- {fs_type} /dev/root rw,errors=continue"


def _proc(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
    return tmp_path / "proc"


PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@given(PATHS)
def test_escapes_are_undone(path: str) -> None:
    assert unescape(_escape(path)) == path


@given(st.lists(PATHS, max_size=5), st.sampled_from(["", "shared:1 ", "shared:1 master:2 "]))
def test_every_mount_point_comes_back(paths: list[str], optional: str) -> None:
    text = "\n".join(_line("/" + path, opt=optional) for path in paths) + "\n"
    parsed = mounts.parse_mountinfo(text)
    assert [mount.mount_point for mount in parsed] == ["/" + path for path in paths]
    assert all(mount.fs_type == "ext4" and mount.device == "98:0" for mount in parsed)


@given(st.text())
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    mounts.parse_mountinfo(text)


def test_the_longest_mount_point_wins_and_of_two_the_later(tmp_path: Path) -> None:
    proc = _proc(
        tmp_path,
        _line("/", "ext4"),
        _line("/mnt/a", "xfs"),
        _line("/mnt/a", "btrfs"),
        _line("/mnt/ab", "tmpfs"),
    )
    assert mounts.mount_of(Path("/mnt/a/x"), proc=proc).fs_type == "btrfs"
    assert mounts.mount_of(Path("/mnt/a"), proc=proc).fs_type == "btrfs"
    assert mounts.mount_of(Path("/mnt/abc"), proc=proc).fs_type == "ext4"
    assert mounts.mount_of(Path("/mnt/ab/absent/too"), proc=proc).fs_type == "tmpfs"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    proc = _proc(tmp_path, _line("/"), _line(str(tmp_path / "target"), "tmpfs"))
    assert mounts.mount_of(tmp_path / "link" / "file", proc=proc).fs_type == "tmpfs"


def test_read_only_by_mount_or_by_file_system() -> None:
    (by_mount,) = mounts.parse_mountinfo(_line("/", options="ro,relatime"))
    (neither,) = mounts.parse_mountinfo(_line("/"))
    (by_system,) = mounts.parse_mountinfo(_line("/").replace("rw,errors", "ro,errors"))
    assert [m.read_only for m in (by_mount, neither, by_system)] == [True, False, True]


def test_our_mounts_are_found_by_type(tmp_path: Path) -> None:
    proc = _proc(tmp_path, _line("/"), _line("/run/isw x", mounts.FUSE_TYPE), _line("/b", "fuse"))
    assert [m.mount_point for m in mounts.infiniswap_mounts(proc=proc)] == ["/run/isw x"]
    assert len(mounts.mounts_of_device("98:0", proc=proc)) == 3
    assert mounts.mounts_of_device("98:1", proc=proc) == ()


def test_a_btrfs_is_found_by_each_of_its_devices(tmp_path: Path) -> None:
    """Its mount has a number of its own, and names one device."""
    named = next((path for path in Path("/dev").iterdir() if path.is_block_device()), None)
    if named is None:
        pytest.skip("needs a block device in /dev")
    number = number_text(named.stat().st_rdev)
    btrfs = _line("/data", "btrfs").replace("98:0", "0:45").replace("/dev/root", str(named))
    other = _line("/other", "btrfs").replace("98:0", "0:46").replace("/dev/root", "/dev/absent")
    proc = _proc(tmp_path, _line("/"), btrfs, other)
    devices = {"one/dev": number, "two/dev": "250:77"}
    sys = make_files(tmp_path / "sys", {f"fs/btrfs/id/devices/{k}": v for k, v in devices.items()})
    for device in (number, "250:77"):
        found = mounts.mounts_of_device(device, proc=proc, sys=sys)
        assert [mount.mount_point for mount in found] == ["/data"]
    assert mounts.mounts_of_device("250:78", proc=proc, sys=sys) == ()
    assert len(mounts.mounts_of_device(number, proc=proc, sys=tmp_path / "absent")) == 1


def test_an_empty_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemCallError):
        mounts.mount_of(Path("/x"), proc=_proc(tmp_path))
    with pytest.raises(SystemCallError):
        mounts.mounts(proc=tmp_path / "absent")


def test_unmounting_what_is_no_mount_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((SystemCallError, NotPermittedError), match="cannot unmount"):
        mounts.unmount(tmp_path)
