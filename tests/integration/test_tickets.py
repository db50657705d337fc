# SPDX-License-Identifier: Apache-2.0
"""Tickets of data connections: a device whose packets somebody reads; the operator's command."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import SLAB, WAIT_S, Cluster, until
from support.devices.nbd_client import bring_to_donor, connected
from support.donors.on_the_path import OnThePath

from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

PAGE = 4096


@pytest.fixture
def path(cluster: Cluster) -> Iterator[OnThePath]:
    path = OnThePath(cluster.donor())
    yield path
    path.close()


def is_cut(client: socket.socket) -> bool:
    client.settimeout(WAIT_S)
    return nbd.receive(client, 1) == b""


@pytest.mark.requires_root
@pytest.mark.parametrize("steals", [1, 2])
def test_a_device_has_its_connections_though_a_thief_is_first(
    cluster: Cluster, path: OnThePath, steals: int
) -> None:
    path.steals = steals
    options = ("--frontend", "nbd-socket", "--transport", "tcp", "--donors", path.address)
    device = cluster.start(*options, size=str(SLAB))
    data = os.urandom(PAGE)
    with connected(device.socket) as client:
        bring_to_donor(device, client, data)
        assert path.steals == 0
        assert nbd.read(client, 0, PAGE) == data
        # Later tickets have ended the thief's connections, and used ones are of no use.
        assert len(path.stolen) == steals
        assert all(is_cut(mine) for mine in path.stolen)
        assert not any(path.steal(ticket) for ticket in path.tickets)
        assert "did not accept a ticket that it had just given" in device.log
        assert nbd.read(client, 0, PAGE) == data
        assert device.status["stats"]["requests_failed"] == 0
        with contextlib.suppress(OSError):
            client.sendall(nbd.request(nbd.DISC))


@pytest.mark.requires_root
def test_a_thief_is_first_at_a_reconnect(cluster: Cluster, path: OnThePath) -> None:
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "60"
    options = ("--frontend", "nbd-socket", "--transport", "tcp", "--donors", path.address)
    device = cluster.start(*options, size=str(SLAB))
    data = os.urandom(PAGE)
    with connected(device.socket) as client:
        bring_to_donor(device, client, data)
        path.steals = 2
        path.cut()
        until(lambda: device.status["donors"][0]["reclaimed"] > 0, "the lease to be reclaimed")
        assert path.steals == 0
        assert all(is_cut(mine) for mine in path.stolen)
        assert not any(path.steal(ticket) for ticket in path.tickets)
        bring_to_donor(device, client, data)
        assert nbd.read(client, 0, PAGE) == data
        assert device.status["stats"]["requests_failed"] == 0
        with contextlib.suppress(OSError):
            client.sendall(nbd.request(nbd.DISC))


# ---------------------------------------------------------------------- the command


class Command:
    """A running `infiniswap donor ticket`."""

    def __init__(self, cluster: Cluster, *args: str) -> None:
        donor = cluster.donor()
        command = [*cluster.program, "donor", "ticket", donor.address, *args]
        self.process = subprocess.Popen(
            command, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.uri = self.process.stdout.readline().strip()
        found = re.fullmatch(rf"nbd://127\.0\.0\.1:{donor.data}/([0-9a-f]{{32}})", self.uri)
        assert found, self.uri or (self.process.stderr and self.process.stderr.read())
        self.ticket = found[1]
        self._donor = donor

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._donor.data), WAIT_S)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_commands_ticket_ends_with_it(cluster: Cluster, number: signal.Signals) -> None:
    command = Command(cluster, "--slabs", "2", "--connections", "2")
    data = os.urandom(PAGE)
    with command.dial() as first, command.dial() as second, command.dial() as third:
        assert nbd.open_export(first, command.ticket) == nbd.ACK
        assert nbd.open_export(second, command.ticket) == nbd.ACK
        assert nbd.open_export(third, command.ticket) == nbd.ERR_UNKNOWN
        assert nbd.write(first, 2 * SLAB - PAGE, data) == 0
        assert nbd.read(second, 2 * SLAB - PAGE, PAGE) == data
        ended = command.end(number)
        assert ended == (-number if number == signal.SIGKILL else 0)
        assert is_cut(first)
        assert is_cut(second)
    with command.dial() as late:
        assert nbd.open_export(late, command.ticket) == nbd.ERR_UNKNOWN


@pytest.mark.requires_tool("nbdinfo")
def test_programs_use_it(cluster: Cluster) -> None:
    command = Command(cluster, "--slabs", "2")
    for program in (["nbdinfo", "--size"], ["nbdinfo", "--size"]):
        done = subprocess.run(
            [*program, command.uri], capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        assert int(done.stdout) == 2 * SLAB
    if shutil.which("nbdcopy"):
        copy = cluster.root / "copy"
        subprocess.run(["nbdcopy", command.uri, str(copy)], timeout=WAIT_S, check=True)
        assert copy.stat().st_size == 2 * SLAB
    assert command.end(signal.SIGINT) == 0


def test_more_slabs_than_there_are(cluster: Cluster) -> None:
    donor = cluster.donor(pool=str(2 * SLAB // MIB) + "M")
    done = cluster.cli("donor", "ticket", donor.address, "--slabs", "9")
    assert done.returncode not in (0, 1)
    assert "Traceback" not in done.stderr
    assert "no lease" not in done.stderr
    assert cluster.cli("donor", "ticket", donor.address, "--slabs", "0").returncode == 2
