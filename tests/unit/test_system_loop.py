# SPDX-License-Identifier: Apache-2.0
"""Loop devices as /sys tells of them; tests/system has the real ones."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from support.machine.made_host import make_files

from infiniswap.errors import ConflictError, NotFoundError, SystemCallError, UnavailableError
from infiniswap.system import loop


def _device(sys: Path, number: int, backing: str | None, *, dio: int = 1, clear: int = 0) -> Path:
    directory = sys / "block" / f"loop{number}"
    (directory / "queue").mkdir(parents=True)
    if backing is None:
        return make_files(directory, {"size": 0})
    loop_files = {"loop/backing_file": backing, "loop/dio": dio, "loop/autoclear": clear}
    return make_files(directory, {"size": 2048, **loop_files})


def test_attached_devices_in_order(tmp_path: Path) -> None:
    _device(tmp_path, 10, "/b c\n d")
    _device(tmp_path, 2, "/a (deleted)", dio=0, clear=1)
    _device(tmp_path, 3, None)
    (tmp_path / "block" / "loop-control").mkdir()
    two, ten = loop.attached(sys=tmp_path)
    assert two == loop.LoopDevice(2, "/a", deleted=True, direct_io=False, autoclear=True)
    assert ten == loop.LoopDevice(10, "/b c\n d", deleted=False, direct_io=True, autoclear=False)
    assert ten.path == Path("/dev/loop10")
    assert loop.size_bytes(ten, sys=tmp_path) == 1 << 20
    assert loop.find_by_backing(Path("/x/../a"), sys=tmp_path) == (two,)
    assert loop.attached(sys=tmp_path / "absent") == ()


def test_a_number_that_was_detached_and_taken_again_is_another_attachment(tmp_path: Path) -> None:
    directory = _device(tmp_path, 1, "/a")

    def found() -> loop.LoopDevice:
        (device,) = loop.attached(sys=tmp_path)
        return device

    old = found()
    assert old.sequence is None  # before Linux 5.15 only the file tells
    assert old.is_attachment(old)
    (directory / "loop" / "backing_file").write_text("/b\n")
    assert not found().is_attachment(old)
    (directory / "diskseq").write_text("41\n")
    first = found()
    (directory / "loop" / "backing_file").write_text("/renamed\n")
    renamed = found()
    (directory / "diskseq").write_text("43\n")
    second = found()
    assert renamed.is_attachment(first)
    assert not second.is_attachment(renamed)


def test_tuning_names_what_was_refused(tmp_path: Path) -> None:
    directory = _device(tmp_path, 0, "/a")
    device = loop.loop_device(0, sys=tmp_path)
    assert device is not None
    for name in ("max_sectors_kb", "rotational"):
        (directory / "queue" / name).write_text("")
    (directory / "queue" / "scheduler").mkdir()
    refused = loop.tune(device, sys=tmp_path)
    assert "scheduler" in refused
    assert (directory / "queue" / "rotational").read_text() == "0"
    assert (directory / "queue" / "max_sectors_kb").read_text() == "128"


def test_page_outs_are_held_back_on_disks_only_and_not_after_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _device(tmp_path, 4, "/a")
    throttling = directory / "queue" / "wbt_lat_usec"
    throttling.write_text("2000\n")
    device = loop.loop_device(4, sys=tmp_path)
    assert device is not None
    loop.tune(device, sys=tmp_path)
    assert throttling.read_text() == "0"
    loop.tune(device, is_disk=True, sys=tmp_path)
    assert throttling.read_text() == "-1"  # the kernel's own, whoever had the device before
    assert (directory / "queue" / "rotational").read_text() == "0"
    loop.tune(device, sys=tmp_path)
    backing = directory / "loop" / "backing_file"

    def losetup(argv: list[str], **_: object) -> str:
        backing.write_text("/b\n")  # somebody else takes it at once
        return ""

    monkeypatch.setattr(loop, "run_command", losetup)
    loop.detach(device, sys=tmp_path)
    assert throttling.read_text() == "0"
    backing.unlink()  # it was in use, and the kernel has detached it later
    loop.detach(device, sys=tmp_path)
    assert throttling.read_text() == "-1"


def test_a_size_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        loop.size_bytes(loop.LoopDevice(9, "/x", False, True, False), sys=tmp_path)


def test_a_device_taken_by_somebody_else_is_tried_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _device(tmp_path, 4, "/a")
    busy = SystemCallError("`losetup` failed: /a: Device or resource busy")
    losetup = Mock(side_effect=[busy, busy, "/dev/loop4\n", *[busy] * loop.ATTACH_TRIES_MAX])
    monkeypatch.setattr(loop, "run_command", losetup)
    assert loop.attach(Path("/a"), sys=tmp_path).number == 4
    assert losetup.call_count == 3
    with pytest.raises(SystemCallError, match="busy"):
        loop.attach(Path("/a"), sys=tmp_path)


def test_no_loop_devices_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = SystemCallError("`losetup` failed: cannot find an unused loop device")
    monkeypatch.setattr(loop, "run_command", Mock(side_effect=error))
    with pytest.raises(UnavailableError, match="modprobe loop"):
        loop.attach(Path("/a"), sys=tmp_path)


def test_a_device_without_direct_io_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _device(tmp_path, 4, "/a", dio=0)

    def losetup(argv: list[str], **_: object) -> str:
        if "--detach" in argv:
            (directory / "loop" / "backing_file").unlink()
            return ""
        return "/dev/loop4\n"

    monkeypatch.setattr(loop, "run_command", losetup)
    with pytest.raises(UnavailableError, match="direct I/O"):
        loop.attach(Path("/a"), sys=tmp_path)
    assert loop.attached(sys=tmp_path) == ()


def test_a_device_that_stays_busy_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _device(tmp_path, 4, "/a")
    monkeypatch.setattr(loop, "run_command", Mock(return_value=""))
    device = loop.loop_device(4, sys=tmp_path)
    assert device is not None
    with pytest.raises(ConflictError, match="still in use"):
        loop.detach(device, timeout_s=0.05, sys=tmp_path)


def test_a_device_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _device(tmp_path, 4, "/theirs")
    monkeypatch.setattr(loop, "run_command", lambda *_, **__: pytest.fail("it was detached"))
    loop.detach(loop.LoopDevice(4, "/ours", False, True, False), sys=tmp_path)
