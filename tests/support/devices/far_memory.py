# SPDX-License-Identifier: Apache-2.0
"""Devices with far memory, and processes that have some (tests/c/far_tester.c)."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pytest

from infiniswap import config as configuration
from infiniswap.cli.device.options import make_spec
from infiniswap.device.control import client, far_client
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import encode_spec
from infiniswap.errors import InfiniswapError
from infiniswap.units import MIB
from support.devices.cluster import Cluster, Device, until
from support.machine.ran import ran

BLOCK = 2 * MIB
_BUILD = Path(__file__).resolve().parents[3] / "build" / "c"
_TESTER = _BUILD / "tests" / "far_tester"
FAR_JOB = _BUILD / "tests" / "test_far_job"
"""Runs programs with the agent."""
_AGENT = _BUILD / "libinfiniswap-far.so"
_LIMIT = 256 * MIB
_START = """
import sys
from pathlib import Path
from infiniswap.device.control import launch
from infiniswap.device.spec.rundir import paths_of
from infiniswap.device.spec.spec import decode_spec

spec = decode_spec(Path(sys.argv[1]).read_bytes(), "spec")
device = spec.config.device
launch.start(spec, paths_of(spec.name, device.run_dir, device.backup_dir))
"""
_PROGRAM = """
import sys
parts = [bytearray(8 << 20) for _ in range(int(sys.argv[1]))]
for round, line in enumerate(sys.stdin):
    for number, part in enumerate(parts):
        if round and part != bytes([round + number]) * len(part):
            sys.exit(f"round {round}: part {number} has other bytes")
        part[:] = bytes([round + 1 + number]) * len(part)
    print(round, flush=True)
"""


def start_far_device(cluster: Cluster, *, size_bytes: int, far_bytes: int) -> Device:
    """A device as a run makes one for itself, on nbd-socket: this process is the run."""
    overrides = {"cluster.peers": cluster.addresses, "device.frontend": "nbd-socket"}
    spec = make_spec(
        argparse.Namespace(backup=None, allow_data_loss=False),
        configuration.load(None, overrides, cluster.env),
        name=cluster.name(),
        size_bytes=size_bytes,
        swap=False,
        ephemeral=True,
        owner_pid=os.getpid(),
    )
    spec = msgspec.structs.replace(spec, far_bytes=far_bytes)
    cluster.backup_dir.mkdir(mode=0o700, exist_ok=True)
    record = cluster.root / f"{spec.name}.spec"
    record.write_bytes(encode_spec(spec))
    done = ran(sys.executable, "-I", "-c", _START, str(record), env=cluster.env)
    assert done.returncode == 0, done.stderr
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


def wait_far(device: Device, is_so: Callable[[Any], object], what: str) -> None:
    """Until the device's far memory is so."""

    def found() -> object:
        try:
            return is_so(device.status["far"])
        except InfiniswapError:
            return None  # between two processes

    until(found, what)


class AgentProcess:
    """A Python program with the agent preloaded, under a limit that is nearly reached.

    Args:
        job: the job's end of a connection; it stays the caller's.
        cgroup: an empty directory, which gets the files of a cgroup.
        parts: of 8 MiB, each with bytes of its own.
    """

    def __init__(self, job: socket.socket, cgroup: Path, parts: int) -> None:
        if not _AGENT.exists():
            pytest.skip(f"not built: {_AGENT.name} (make setup)")
        (cgroup / "memory.usage_in_bytes").write_text(f"{_LIMIT - 8 * MIB}\n")
        (cgroup / "memory.limit_in_bytes").write_text(f"{_LIMIT}\n")
        (cgroup / "memory.stat").write_text("total_inactive_file 0\n")
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, str(parts)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(job.fileno(), device),
                env={
                    "LD_PRELOAD": str(_AGENT),
                    "INFINISWAP_FAR": f"{job.fileno()}:{device}:{cgroup}",
                },
                text=True,
            )
        finally:
            os.close(device)
        self._rounds = 0

    def round(self) -> None:
        """Has every part checked, and given other bytes."""
        self.begin_round()
        self.end_round()

    def begin_round(self) -> None:
        """The same, without waiting for it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end_round(self) -> None:
        """Waits for what was begun."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if said != f"{self._rounds}\n":
            self.process.kill()
            pytest.fail(f"{said!r}: {self.process.communicate()[1]}")
        self._rounds += 1

    def close(self) -> None:
        """It ends in order."""
        _, errors = self.process.communicate()
        assert self.process.returncode == 0, errors
