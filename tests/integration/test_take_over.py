# SPDX-License-Identifier: Apache-2.0
"""A device's process is killed; its successor has every page and the same lease on the donor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import PROGRAM, SLAB, WAIT_S, Cluster, until
from support.devices.copied import nbdcopy
from support.machine.trap import Trap, assert_untouched

from infiniswap.engine.protocol import StateInfo
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 16 * MIB
SLABS = SIZE // SLAB
_PROGRAM = Path(__file__).resolve().parents[1] / "support/devices/state_device.py"


class Life:
    """One process of the device."""

    def __init__(self, role: str, fd: int, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), role, str(fd), *args, str(SIZE), str(SLAB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(fd,),
        )

    def until(self, condition: Callable[[Any], bool]) -> Any:
        """The first of its lines for which that holds; pytest's own limit bounds it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if condition(about := json.loads(line)):
                return about
        raise AssertionError(f"it ended with {self.process.wait(WAIT_S)}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def _state() -> Iterator[int]:
    fd = os.memfd_create("state")
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("backup", [True, False])
def test_a_successor_has_every_page_and_the_same_lease(
    cluster: Cluster, tmp_path: Path, backup: bool
) -> None:
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"  # on a machine that is busy
    donor = cluster.donor()
    socket = tmp_path / "nbd.sock"
    uri = f"nbd+unix:///?socket={socket}"
    original, back = tmp_path / "original", tmp_path / "back"
    original.write_bytes(os.urandom(SIZE))
    args = (str(cluster.root / "backup.img") if backup else "none", donor.address, str(socket))
    lives: list[Life] = []
    with _state() as fd:
        try:
            lives.append(Life("first", fd, *args))
            before = lives[-1].until(lambda about: about["slabs"] == SLABS)
            for number in range(3):
                if number != 1:  # the second one dies before it has been used
                    nbdcopy(original, uri)
                lives.append(Life("standby", fd, *args))
                lives[-1].until(lambda about: about["state"] == "standby")
                lives[-2].kill()
                socket.unlink(missing_ok=True)
                lives[-1].go()
                about = lives[-1].until(lambda about: about["state"] == "mapped")
                assert about["slabs"] == SLABS
                assert about["lease"] == before["lease"]
                assert about["epoch"] > before["epoch"]
                before = about
                nbdcopy(uri, back)
                assert back.read_bytes() == original.read_bytes()
            pages = SIZE // PAGE_BYTES
            stats = lives[-1].until(
                lambda about: about["valid"] == pages <= about["stats"]["pages_in"]
            )["stats"]
            assert stats["requests_failed"] == 0
            assert stats["crc_errors_remote"] == 0
            assert stats["crc_errors_backup"] == 0
            assert stats["pages_in_remote"] > 0
        finally:
            for life in lives:
                life.kill()


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
    done = subprocess.run(
        argv, env=cluster.env, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
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
