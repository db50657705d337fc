# SPDX-License-Identifier: Apache-2.0
"""Backups over the kernel's own layers: zram, the device mapper, and devices of ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, Device, run

from infiniswap.errors import BackupError
from infiniswap.system import backup
from infiniswap.units import MIB

pytestmark = pytest.mark.requires_tool("dmsetup", "mkfs.ext4", "zramctl")

SECTORS = 65536
"""Of 512 bytes, mapped by the device mapper."""


@pytest.fixture(autouse=True)
def _no_udev(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DM_DISABLE_UDEV", "1")  # else dmsetup waits for it


@contextlib.contextmanager
def mapped(below: Path, name: str) -> Iterator[Path]:
    run("dmsetup", "create", name, "--table", f"0 {SECTORS} linear {below} 0")
    try:
        yield Path("/dev/mapper") / name
    finally:
        run("dmsetup", "remove", "--retry", name)


@contextlib.contextmanager
def mounted(device: Path, point: Path) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    run("mkfs.ext4", "-q", "-F", device)
    run("mount", device, point)
    try:
        yield point
    finally:
        run("umount", point)


@contextlib.contextmanager
def looped(file: Path) -> Iterator[Path]:
    path = Path(run("losetup", "--find", "--show", file).strip())
    try:
        yield path
    finally:
        run("losetup", "--detach", path)


def refusal(path: Path) -> str:
    with pytest.raises(BackupError) as caught:
        backup.check_backup(path, MIB)
    return caught.value.what


def test_zram_below_other_layers_is_found(modules: Callable[..., None], tmp_path: Path) -> None:
    modules("zram", "dm_mod")
    zram = Path(run("zramctl", "--find", "--size", "64M").strip())
    try:
        why = f"{zram}, which is the very memory that swapping is to free"
        assert "it is the very memory" in refusal(zram)
        with mapped(zram, "isw-over-zram") as upper:
            assert why in refusal(upper)
            with mounted(upper, tmp_path / "there") as point:
                assert why in refusal(point / "backup")
    finally:
        run("zramctl", "--reset", zram)


def test_a_disk_below_other_layers_is_found(
    modules: Callable[..., None], module_cluster: Cluster
) -> None:
    modules("dm_mod")
    file = module_cluster.root / "image"
    with file.open("wb") as image:
        os.posix_fallocate(image.fileno(), 0, SECTORS * 512)
    with looped(file) as lower, mapped(lower, "isw-over-loop") as upper:
        backup.check_backup(upper, MIB)
        os.truncate(file, 2 * SECTORS * 512)
        assert f"{file}, which is a sparse file" in refusal(upper)
    file.unlink()


@pytest.mark.parametrize(
    "frontend", ["ublk", pytest.param("nbd", marks=pytest.mark.full)], indirect=True
)
def test_a_device_of_ours_is_no_place_for_a_backup(
    frontend: str, modules: Callable[..., None], module_cluster: Cluster
) -> None:
    modules("dm_mod")
    device = module_cluster.start("--frontend", frontend, size="64M")
    node = device.path.resolve()
    why = "is served by another process or host"
    assert why in refusal(node)
    with mapped(node, "isw-over-ours") as upper:
        assert why in refusal(upper)
        _is_not_removed(device, "lies on it (isw-over-ours)")
    with looped(node) as loop:
        assert why in refusal(loop)
        _is_not_removed(device, f"the loop device {loop} lies on it")
    with mounted(node, module_cluster.root / "on-ours") as point:
        assert why in refusal(point / "backup")
    device.remove()


def _is_not_removed(device: Device, why: str) -> None:
    done = device.command("remove")
    assert done.returncode == 9
    assert why in done.stderr
    assert device.status["state"] == "serving"
