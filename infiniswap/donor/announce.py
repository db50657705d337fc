# SPDX-License-Identifier: Apache-2.0
"""A daemon announces itself on the broker, where `cluster.discovery` is mqtt."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from infiniswap import __version__
from infiniswap.config import Config
from infiniswap.control import messages as m
from infiniswap.control.key_ring import KeyRing
from infiniswap.discovery.announcement import ADDRESSES_MAX, Announcement, MemoryTelemetry
from infiniswap.discovery.announcer import Announcer
from infiniswap.donor.service import DonorService
from infiniswap.keys import announcement_keys
from infiniswap.units import HostPort

_TELL_S: Final = 0.5
_END_S: Final = 5.0
"""More than withdrawing takes."""


async def announce(config: Config, service: DonorService, keys: KeyRing) -> None:
    """Announces the donor until cancelled, and then withdraws the announcement."""
    announcer = make_announcer(config, service, keys)
    announcing = asyncio.create_task(announcer.run(), name="announcer")
    try:
        while not announcing.done():
            service.degraded["announce"] = announcer.degraded()
            await asyncio.wait({announcing}, timeout=_TELL_S)
        await announcing
    finally:
        while not announcing.done():  # one cancellation may be lost: see the announcer
            announcing.cancel()
            await asyncio.wait({announcing}, timeout=_END_S)


def make_announcer(config: Config, service: DonorService, keys: KeyRing) -> Announcer:
    """The announcer of this donor."""

    async def make(local: str, session: str) -> Announcement:
        more = [one.name for one in service.transports if one.enabled and await one.is_usable()]
        return _announcement(config, service.status(), local, session, ["tcp", *more])

    return Announcer(
        config.mqtt,
        lambda: announcement_keys(keys.accepted()),
        make,
        lambda: _telemetry(config, service.status()),
        random.Random(),
    )


def addresses(config: Config, port: int, local: str) -> tuple[HostPort, ...]:
    """The addresses at which others reach this donor.

    Args:
        config: may say so.
        port: of the control API.
        local: this host's address on the way to the broker; for a donor that listens on all.
    """
    if config.mqtt.advertise:
        return config.mqtt.advertise
    host = config.daemon.listen.host
    return (HostPort(local if config.daemon.listen.is_wildcard else host, port),)


def _announcement(
    config: Config, status: m.Status, local: str, session: str, transports: list[str]
) -> Announcement:
    found = addresses(config, status.control_port, local)
    return Announcement(
        cluster=config.cluster.name,
        donor_id=status.donor_id,
        session=session,
        name=status.donor_name,
        addresses=[str(address) for address in found[:ADDRESSES_MAX]],
        transports=transports,
        slab_bytes=status.slab_bytes,
        protocols=list(status.versions),
        software=__version__,
        every_s=config.mqtt.announce_s,
    )


def _telemetry(config: Config, status: m.Status) -> MemoryTelemetry:
    return MemoryTelemetry(
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
