# SPDX-License-Identifier: Apache-2.0
"""A device's process is killed; its successor has every page and the same lease on the donor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import PROGRAM, SLAB, Cluster, until
from support.devices.copied import Copied
from support.machine.ran import ran
from support.machine.trap import Trap, assert_untouched

from infiniswap.engine.protocol import StateInfo
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 16 * MIB
SLABS = SIZE // SLAB


@contextlib.contextmanager
def _state() -> Iterator[int]:
    fd = os.memfd_create("state")
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("backup", [(), ("--backup", "none")], ids=["backup", "none"])
def test_a_successor_has_every_page_and_the_same_lease(
    cluster: Cluster, tmp_path: Path, backup: tuple[str, ...]
) -> None:
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"  # on a machine that is busy
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    donor = cluster.donor()
    device = cluster.start("--frontend", "nbd-socket", *backup, size=str(SIZE))
    contents = Copied(device, tmp_path)

    def lease() -> dict[str, Any]:
        (found,) = cluster.donor_row(donor)["status"]["leases"]
        return dict(found)

    for kill in range(1, 4):
        if kill != 2:  # the second one dies before it has been used
            contents.fill(SIZE)
        before = lease()
        device.wait_standby()
        device.kill()
        device.wait_take_over(kill)
        until(lambda: device.status["slabs"].get("mapped") == SLABS, "slabs that are resumed")
        after = lease()
        assert (after["lease"], after["slots_mapped"]) == (before["lease"], SLABS)
        assert after["epoch"] > before["epoch"]
        counted = contents.read_back()
        assert counted["pages_in_remote"] > 0
        assert counted["requests_failed"] == counted["crc_errors_remote"] == 0
        assert counted["crc_errors_backup"] == 0


@pytest.mark.requires_root
def test_a_device_and_all_that_it_starts_run_nothing_of_the_callers_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    trap, name, donor = Trap(tmp_path), cluster.name(), cluster.donor()
    cluster.env["INFINISWAP_CLUSTER_PEERS"] = donor.address
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.env["INFINISWAP_CLUSTER_DISCOVERY"] = "mqtt"
    cluster.env["INFINISWAP_MQTT_BROKER"] = "127.0.0.1:1"  # nobody is there
    argv = [*trap.prefix, *PROGRAM, "device", "start", name, "--size", str(SIZE)]
    argv += ["--frontend", "nbd-socket"]
    done = ran(*argv, env=cluster.env)
    assert done.returncode == 0, done.stderr

    parts = ("infiniswap-holder", " active", " standby", "discovery.listener_process")

    def started() -> dict[str, int]:
        return {
            part: pid
            for pid, command in cluster.processes().items()
            for part in parts[: 1 if parts[0] in command else None]
            if part in command
        }

    processes = until(lambda: found if len(found := started()) == 4 else None, "all four")
    for pid in processes.values():
        assert_untouched(pid)
    assert not trap.ran.exists()


def test_a_state_file_says_what_it_is_of(cluster: Cluster, tmp_path: Path) -> None:
    from infiniswap.engine.native import NativeEngine
    from infiniswap.engine.native_engine import read_state
    from infiniswap.engine.protocol import EngineConfig
    from infiniswap.errors import ConflictError, EngineError

    with _state() as fd:
        with pytest.raises(EngineError, match="empty"):
            read_state(fd)
        path = str(cluster.root / "backup.img")
        config = EngineConfig(size_bytes=SIZE, slab_bytes=SLAB, staging_pages=64, state_fd=fd)
        with NativeEngine(config, path):
            info = read_state(fd)
            with pytest.raises(ConflictError, match="alive"):
                NativeEngine(config, str(tmp_path / "another"))
        assert info == StateInfo(
            size_bytes=SIZE,
            slab_bytes=SLAB,
            file_bytes=os.fstat(fd).st_size,
            staging_pages=64,
            remotes_max=config.remotes_max,
            no_backup=False,
            version=info.version,
            ready=True,
        )
