# SPDX-License-Identifier: Apache-2.0
"""The page of a daemon (infiniswap.ui): whom it asks, and with which keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from infiniswap.control import messages as m
from infiniswap.control.client import ClientConfig
from infiniswap.control.host_name import host_name
from infiniswap.control.key_ring import KeyRing
from infiniswap.ui import assets
from infiniswap.ui.cluster_watch import ClusterWatch
from infiniswap.ui.page import ClusterPage
from infiniswap.units import HostPort
from infiniswap.watch.asking import AskedDonor, ask

if TYPE_CHECKING:
    from infiniswap.control.server import ControlServer
    from infiniswap.discovery.find import Found
    from infiniswap.donor.credentials import DonorCredentials
    from infiniswap.donor.service import DonorService


async def make_page(
    service: DonorService,
    server: ControlServer,
    keys: KeyRing,
    credentials: DonorCredentials | None,
) -> ClusterPage:
    """The page of this daemon. It reads what a command on this host could read with the same secret
    or certificate, and asks for it only while a browser watches."""
    listen, cluster = service.config.daemon.listen, service.config.cluster

    async def own() -> tuple[HostPort, m.Status]:
        await service.refresh()
        status = service.status()
        if credentials is not None:  # by the name that all others call it
            status = structs.replace(status, donor_name=credentials.client.subject.host)
        return HostPort(listen.host, service.control_port), status

    def find_donors() -> Found:
        from infiniswap.discovery.find import find  # late: few daemons are watched

        return find(service.config)

    async def ask_donors(addresses: Sequence[HostPort]) -> list[AskedDonor]:
        client = ClientConfig(
            keys=keys.first,
            credentials=None if credentials is None else credentials.client,
            connect_s=service.config.cluster.ask_s,
        )
        return await ask(addresses, client)

    return ClusterPage(
        await asyncio.to_thread(assets.load),
        ClusterWatch(own, find_donors, ask_donors),
        server.counters,
        # Without a configured secret the daemon serves this host alone, and every user of it may
        # read the status by a Unix socket (infiniswap.control.local).
        names=[
            host_name(),
            *(address.host for address in (listen, *service.config.mqtt.advertise)),
        ],
        is_open_here=cluster.trust_file is None and service.config.daemon.run_dir is not None,
    )
