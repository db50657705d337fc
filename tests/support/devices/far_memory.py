# SPDX-License-Identifier: Apache-2.0
"""Devices with far memory, and processes that have some (tests/c/far_tester.c)."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import pytest

from infiniswap import config as configuration
from infiniswap.cli.device.options import make_spec
from infiniswap.device.control import client, far_client, launch
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import InfiniswapError
from infiniswap.units import MIB
from support.devices.cluster import Cluster, Device, until

BLOCK = 2 * MIB
_TESTER = Path(__file__).resolve().parents[3] / "build" / "c" / "tests" / "far_tester"


def start_far_device(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, size_bytes: int, far_bytes: int
) -> Device:
    """A device as a run makes one for itself, on nbd-socket: this process is the run."""
    for name, value in cluster.env.items():
        if name.startswith("INFINISWAP_"):
            monkeypatch.setenv(name, value)
    overrides = {"cluster.peers": cluster.addresses, "device.frontend": "nbd-socket"}
    spec = make_spec(
        argparse.Namespace(backup=None, allow_data_loss=False),
        configuration.load(None, overrides),
        name=cluster.name(),
        size_bytes=size_bytes,
        swap=False,
        ephemeral=True,
        owner_pid=os.getpid(),
    )
    spec = msgspec.structs.replace(spec, far_bytes=far_bytes)
    cluster.backup_dir.mkdir(mode=0o700, exist_ok=True)
    launch.start(spec, paths_of(cluster, spec.name))
    return Device(cluster, spec.name)


def paths_of(cluster: Cluster, name: str) -> DevicePaths:
    """Of a device of the cluster."""
    return DevicePaths(name, cluster.run_dir / name, cluster.backup_dir)


def connect_job(device: Device) -> socket.socket:
    """A job's end of a connection, once the device takes jobs."""
    paths = paths_of(device.cluster, device.name)

    def connected() -> socket.socket | None:
        try:
            return far_client.connect(paths)
        except InfiniswapError:
            return None

    found = until(connected, "a device that takes a job")
    assert isinstance(found, socket.socket)
    return found


def leave(device: Device) -> None:
    """The run ends, and its device with it."""
    client.leave(paths_of(device.cluster, device.name), os.getpid(), wait=True)


class FarProcess:
    """A process with far memory. A context: it is killed at the end."""

    def __init__(self, job: socket.socket) -> None:
        if not _TESTER.exists():
            pytest.skip(f"not built: {_TESTER.name} (make setup)")
        self._process = subprocess.Popen(
            [_TESTER, str(job.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(job.fileno(),),
            text=True,
        )

    def __enter__(self) -> FarProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def hello(self) -> None:
        """Says hello, which must be taken."""
        assert self._ask("hello") == "refused 0"

    def write(self, block: int, value: int) -> None:
        """Fills a block."""
        assert self._ask(f"write {block} {value}") == "0"

    def read(self, block: int, value: int) -> None:
        """Reads a block, which must be filled with that."""
        assert self._ask(f"read {block} {value}") == "0 same"

    def wait_gone(self) -> None:
        """Until the device's process that it has spoken to is gone."""
        assert self._ask("gone") == "gone"

    def _ask(self, line: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{line}\n")
        stdin.flush()
        return stdout.readline().rstrip("\n")


def wait_far(device: Device, is_so: Callable[[dict[str, object]], object], what: str) -> None:
    """Until the device's far memory is so."""

    def found() -> object:
        try:
            return is_so(device.told["far"])
        except InfiniswapError:
            return None  # between two processes

    until(found, what)
