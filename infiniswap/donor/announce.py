# SPDX-License-Identifier: Apache-2.0
"""What a daemon announces of itself, where `cluster.discovery` is mqtt."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from infiniswap import __version__
from infiniswap.config import Config
from infiniswap.control import messages as m
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.discovery.announcement import Announcement, MemoryFigures
    from infiniswap.discovery.announcer import Announcer
    from infiniswap.donor.service import DonorService

_TELL_S: Final = 0.5


async def announce(config: Config, service: DonorService, secret: bytes | None) -> None:
    """Announces the donor until cancelled, and then withdraws that. Never ends by itself."""
    announcer = make_announcer(config, service.status, secret)
    announcing = asyncio.create_task(announcer.run(), name="announcer")
    told: list[str] = []
    try:
        while not announcing.done():
            for sentence in told:
                service.degraded.remove(sentence)
            told = announcer.degraded()
            service.degraded += told
            await asyncio.wait({announcing}, timeout=_TELL_S)
        await announcing
    finally:
        announcing.cancel()
        await asyncio.wait({announcing})


def make_announcer(
    config: Config, status: Callable[[], m.Status], secret: bytes | None
) -> Announcer:
    """The announcer of the donor with this status."""
    # Late: a daemon with a list of peers has no use for any of it.
    from infiniswap.discovery.announcer import Announcer

    return Announcer(
        config.mqtt,
        secret,
        lambda local, session: _announcement(config, status(), local, session),
        lambda: _figures(config, status()),
        random.Random(),
    )


def addresses(config: Config, port: int, local: str) -> tuple[HostPort, ...]:
    """Where others reach this donor.

    Args:
        config: may say so.
        port: of the control API.
        local: this host's address on the way to the broker; for a donor that listens on all.
    """
    if config.mqtt.advertise:
        return config.mqtt.advertise
    host = config.daemon.listen.host
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = local
    return (HostPort(host, port),)


def _announcement(config: Config, status: m.Status, local: str, session: str) -> Announcement:
    from infiniswap.discovery.announcement import ADDRESSES_MAX, Announcement

    found = addresses(config, status.control_port, local)
    return Announcement(
        cluster=config.cluster.name,
        donor_id=status.donor_id,
        session=session,
        name=status.donor_name,
        addresses=[str(address) for address in found[:ADDRESSES_MAX]],
        transports=["tcp", *(["rdma"] if config.daemon.rdma == "auto" else [])],
        slab_bytes=status.slab_bytes,
        protocols=list(status.versions),
        software=__version__,
        every_s=config.mqtt.announce_s,
    )


def _figures(config: Config, status: m.Status) -> MemoryFigures:
    from infiniswap.discovery.announcement import MemoryFigures

    return MemoryFigures(
        cluster=config.cluster.name,
        donor_id=status.donor_id,
        name=status.donor_name,
        used_share=status.memory.used_share,
        total_bytes=status.memory.total_bytes,
        slab_bytes=status.slab_bytes,
        slabs_mapped=status.pool.slabs_mapped,
        slabs_free=status.pool.slabs_free,
        can_map=status.pool.can_map,
        draining=status.draining,
    )
