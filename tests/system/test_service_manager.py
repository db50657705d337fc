# SPDX-License-Identifier: Apache-2.0
"""Daemon and device as a service manager sees them: ready, alive, and ending when asked once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, until

pytestmark = NEEDS_SWAP


class Manager:
    """Listens where services report.

    Attributes:
        said: `NAME=value` by pid, in order.
    """

    def __init__(self, root: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.sock.bind(str(root / "notify"))
        self.sock.setblocking(False)
        self.said: list[tuple[int, str]] = []

    @property
    def env(self) -> dict[str, str]:
        """What a manager gives to a service."""
        return {"NOTIFY_SOCKET": self.sock.getsockname(), "WATCHDOG_USEC": "300000"}

    def heard(self, pid: int, line: str) -> bool:
        """Whether that process has said so."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, ancillary, _, _ = self.sock.recvmsg(4096, 64)
                sender = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
                self.said += [(sender, text) for text in data.decode().splitlines()]
        return (pid, line) in self.said


@pytest.fixture
def manager(shared_cluster: Cluster) -> Iterator[Manager]:
    found = Manager(shared_cluster.root)
    with found.sock:
        yield found
    (shared_cluster.root / "notify").unlink()


def test_the_daemon_tells_when_it_serves_lives_and_ends(
    shared_cluster: Cluster, manager: Manager
) -> None:
    before = dict(shared_cluster.env)
    shared_cluster.env |= manager.env
    try:
        donor = shared_cluster.donor()
    finally:
        shared_cluster.env = before
    pid = donor.process.pid
    until(lambda: manager.heard(pid, "READY=1"), "READY")
    until(lambda: manager.heard(pid, "WATCHDOG=1"), "a sign of life")
    assert donor.end() == 0
    shared_cluster.donors.remove(donor)
    assert manager.heard(pid, "STOPPING=1")
    assert {sender for sender, _ in manager.said} == {pid}


@contextlib.contextmanager
def in_foreground(cluster: Cluster, name: str, manager: Manager) -> Iterator[subprocess.Popen[str]]:
    """A device as its unit starts it."""
    argv = [sys.executable, "-m", "infiniswap", "device", "start", name, "--foreground"]
    argv += ["--size", "16M", "--donors", cluster.addresses]
    process = subprocess.Popen(
        argv,
        env={**cluster.env, **manager.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def test_a_device_asked_once_to_stop_ends_as_soon_as_it_can(
    shared_cluster: Cluster, manager: Manager
) -> None:
    name = shared_cluster.name()
    with in_foreground(shared_cluster, name, manager) as process:
        until(lambda: manager.heard(process.pid, "READY=1"), "READY")
        # No child of it speaks for the service.
        assert {sender for sender, _ in manager.said} == {process.pid}
        link = Path("/dev/infiniswap") / name
        held = os.open(link, os.O_RDONLY)
        try:
            process.send_signal(signal.SIGTERM)
            until(lambda: manager.heard(process.pid, "STOPPING=1"), "STOPPING")
            assert process.stdout is not None
            # Refused twice: it was asked again.
            for _ in range(2):
                while "not stopped" not in process.stdout.readline():
                    assert process.poll() is None
        finally:
            os.close(held)
        assert process.wait(WAIT_S) == 0
    assert not link.exists()
    shared_cluster.ok("device", "remove", name)
