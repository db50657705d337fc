# SPDX-License-Identifier: Apache-2.0
"""That the guest is the machine other tests take it for."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.kernels("6.12", "6.1")
def test_the_kernel_is_the_one_asked_for(vm_kernel: str) -> None:
    assert platform.release().startswith(f"{vm_kernel}.")
    assert os.geteuid() == 0


def test_every_cgroup_controller_is_on() -> None:
    root = Path("/sys/fs/cgroup")
    on = set((root / "cgroup.subtree_control").read_text().split())
    assert on == set((root / "cgroup.controllers").read_text().split())
    assert "memory" in on


@pytest.mark.kernels("6.12", "6.1")
@pytest.mark.parametrize("name", ["nbd", "zram", "sch_netem", "rdma_rxe"])
def test_modules_load(name: str, modules: Callable[..., None]) -> None:
    modules(name)
    assert Path("/sys/module", name).is_dir()


def test_ublk_is_there(modules: Callable[..., None]) -> None:
    modules("ublk_drv")
    assert Path("/dev/ublk-control").is_char_device()


def test_a_file_on_the_disk_can_be_swapped_to(tmp_path_factory: pytest.TempPathFactory) -> None:
    area = Path("/var/tmp/area")
    subprocess.run(["fallocate", "-l", "64M", area], check=True)
    area.chmod(0o600)
    subprocess.run(["mkswap", area], check=True, capture_output=True)
    subprocess.run(["swapon", area], check=True)
    assert str(area) in Path("/proc/swaps").read_text()
    subprocess.run(["swapoff", area], check=True)
    area.unlink()


def test_what_is_written_stays_in_the_guest() -> None:
    place = Path(__file__).with_name("written-in-a-guest")
    place.write_text("x")
    assert place.exists()
