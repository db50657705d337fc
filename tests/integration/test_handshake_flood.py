# SPDX-License-Identifier: Apache-2.0
"""A flood of TLS handshakes, at a donor or a metrics port: limited there, and devices page on."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections import Counter

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import SLAB, WAIT_S, Cluster, until
from support.devices.nbd_client import connected
from support.donors.donor_world import client_config, world

from infiniswap.control.client import fetch_status
from infiniswap.control.handshake_rate import PER_HOST
from infiniswap.control.rate import Rate
from infiniswap.control.tls import client_context
from infiniswap.errors import DonorBusyError

PAGE = 4096
FLOODERS = 4


async def test_who_begins_too_often_is_told_so_and_others_are_not_kept_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Of which nothing comes back: a slow machine would never begin too often.
    async with world(tls_per_host=Rate(PER_HOST.burst, 0.0)) as w:
        session = await w.session()

        async def flood() -> None:
            for _ in range(PER_HOST.burst):
                await fetch_status(w.address, client_config())

        with pytest.raises(DonorBusyError, match="too many began lately"):
            await flood()
        assert w.donor.server.counters["handshakes_limited"] == 1
        assert "too many began lately" in caplog.text
        # A session that is open is not touched.
        assert (await session.memory()).can_map
        await session.close()


class Flood:
    """Threads that begin TLS as fast as they can, at the device's own address."""

    def __init__(self, port: int) -> None:
        self.counts: Counter[str] = Counter()
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(FLOODERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self) -> None:
        context = client_context()
        while not self._stop.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self._port), WAIT_S) as raw,
            ):
                try:
                    context.wrap_socket(raw).close()
                    self.counts["shaken"] += 1
                except ssl.SSLError:
                    self.counts["refused"] += 1


def metrics_port(cluster: Cluster) -> int:
    """Where devices that are started from now on serve their metrics."""
    token = cluster.root / "metrics-token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    cluster.env["INFINISWAP_CLUSTER_METRICS_TOKEN_FILE"] = str(token)
    cluster.env["INFINISWAP_DEVICE_METRICS_LISTEN"] = f"127.0.0.1:{port}"
    return port


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.parametrize("flooded", ["donor", "metrics port"])
def test_a_device_pages_through_a_flood_of_handshakes(cluster: Cluster, flooded: str) -> None:
    donor = cluster.donor()
    port = metrics_port(cluster)  # behind the donor, which might take the port that is free
    device = cluster.start("--frontend", "nbd-socket", size=str(SLAB))
    with connected(device.socket) as client:

        def on_donor() -> bool:
            assert nbd.write(client, 0, b"x" * PAGE) == 0
            return int(device.status["pages_on_donors"]) > 0

        until(on_donor, "the page on the donor")
        flood = Flood(donor.control if flooded == "donor" else port)
        try:
            for number in range(500):
                data = os.urandom(PAGE)
                at = number % (SLAB // PAGE) * PAGE
                assert nbd.write(client, at, data) == 0
                assert nbd.read(client, at, PAGE) == data
            # More than bursts, so the pace is what counts.
            until(lambda: flood.counts["refused"] > 200, "refusals")
            assert cluster.donor_row(donor)["state"] != "unreachable"
        finally:
            flood.end()
        status = device.status
        assert status["stats"]["requests_failed"] == 0
        assert sum(status["donors"][0]["sessions_broken"].values()) == 0
        assert int(status["donors"][0]["connections_lost"]) == 0
        client.sendall(nbd.request(nbd.DISC))
