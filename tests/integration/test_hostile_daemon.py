# SPDX-License-Identifier: Apache-2.0
"""A daemon's process under many connections at both its ports."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack

import pytest
from support.devices.cluster import WAIT_S, Cluster, until
from support.devices.nbd_bytes import GREETING, receive
from support.machine.descriptors import files_allowed

pytestmark = pytest.mark.requires_native


def dial(port: int, host: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_S, (host, 0))


def test_it_allows_itself_as_many_files_as_connections(cluster: Cluster) -> None:
    with files_allowed(128):
        donor = cluster.donor()
    with files_allowed(4096), ExitStack() as held:
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            for _ in range(60):
                held.enter_context(dial(donor.control, host))
                client = held.enter_context(dial(donor.data, host))
                assert receive(client, len(GREETING)) == GREETING
        until(lambda: cluster.donor_row(donor)["reachable"], "an answer to status")


def test_short_of_files_it_says_so_once_and_goes_on(cluster: Cluster) -> None:
    donor = cluster.donor()
    resource.prlimit(donor.process.pid, resource.RLIMIT_NOFILE, (60, 60))
    with ExitStack() as held:
        for _ in range(100):
            held.enter_context(dial(donor.control, "127.0.0.1"))
        until(lambda: "no more files can be opened" in donor.log, "the line in the log")
    until(lambda: cluster.donor_row(donor)["reachable"], "an answer to status")
    assert donor.log.count("no more files can be opened") == 1
