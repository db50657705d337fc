# SPDX-License-Identifier: Apache-2.0
"""Devices with the front end ublk, as users have them: donors, swap, stop, a process that dies."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, run, until
from support.devices.ublkservers import SERVER, nodes

from infiniswap.device.frontends.ublk import find_left, give_up
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.system import swap
from infiniswap.units import MIB

pytestmark = pytest.mark.usefixtures("ublk_driver")


def test_auto_takes_it(module_cluster: Cluster) -> None:
    device = module_cluster.start()
    assert device.status["frontend"] == "ublk"
    node = device.path.resolve()
    assert node.name.startswith("ublkb")
    for path in (node, Path(str(node).replace("ublkb", "ublkc"))):
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == 0
    assert "there are ublk devices (1 now)" in module_cluster.cli("doctor").stdout
    run("mkfs.ext4", "-q", str(node))
    mount = module_cluster.root / "mounted"
    mount.mkdir()
    run("mount", str(node), str(mount))
    refused = device.command("stop")
    assert refused.returncode != 0
    assert f"mounted at {mount}" in refused.stderr
    assert device.status["state"] == "serving"
    run("umount", str(mount))
    device.stop()
    assert not nodes()
    assert not device.path.is_symlink()


@pytest.mark.full
def test_what_a_killed_process_left_is_taken_away(module_cluster: Cluster) -> None:
    device = module_cluster.start("--frontend", "ublk")
    paths = DevicePaths(device.name, device.run, module_cluster.backup_dir)
    device.kill()
    assert len(find_left(paths)) == 1
    device.remove()
    assert not find_left(paths)
    assert not nodes()


@pytest.mark.full
def test_swap_space_of_a_killed_process_is_not_taken_away_silently(module_cluster: Cluster) -> None:
    device = module_cluster.start("--frontend", "ublk", "--swap")
    paths = DevicePaths(device.name, device.run, module_cluster.backup_dir)
    node = device.path.resolve()
    device.kill()
    refused = device.command("remove")
    assert refused.returncode != 0
    assert "is swap space of an earlier process" in refused.stderr
    assert swap.find_area(node) is not None
    assert give_up(paths) == ()
    assert swap.find_area(node) is None
    assert not nodes()
    device.remove()
    assert not os.path.lexists(device.path)


@pytest.mark.full  # a standby takes a minute to start here
def test_a_front_end_that_ends_is_taken_over_and_a_device_that_is_removed_ends(
    module_cluster: Cluster,
) -> None:
    device = module_cluster.start("--frontend", "ublk", INFINISWAP_DEVICE_STANDBY="on")
    node = device.path.resolve()
    data = module_cluster.root / "data"
    data.write_bytes(os.urandom(4 * MIB))
    run("dd", f"if={data}", f"of={node}", "bs=256k", "oflag=direct")
    run("blockdev", "--flushbufs", str(node))
    broken = device.processes()["active"]
    run(str(SERVER), "-", "0", "break", str(broken))
    assert device.wait_take_over(1)["pid"] != broken
    run("cmp", "-n", str(4 * MIB), str(data), str(node))
    # Taken away by an administrator it cannot be taken over, not even when its process dies.
    pids = device.processes()
    run(str(SERVER), "-", "0", "remove-by-force", node.name.removeprefix("ublkb"))
    until(lambda: any("front end" in alarm for alarm in device.status["alarms"]), "the alarm")
    assert device.status["pid"] == pids["active"]
    os.kill(pids["active"], signal.SIGKILL)
    until(lambda: not any(map(is_alive, pids.values())), "all of its processes to end")
    device.remove()
    assert not nodes()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
