# SPDX-License-Identifier: Apache-2.0
"""After the engine has taken over: its remotes and slabs find their links again.

This code sends nothing to a donor. Each link reclaims its lease, which makes the donor fence the
dead process's connections, before a slab is resumed, given back or mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from infiniswap.device.donors.lease import Place, decode_record
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.engine.protocol import Engine
from infiniswap.units import HostPort, counted

log = logging.getLogger(__name__)


def restore_links(
    engine: Engine, mapper: SlabMapper, make_link: Callable[[HostPort], DonorLink]
) -> None:
    """Gives every remote that was taken over to its link. Blocking for a moment at most.

    Args:
        engine: after `take_over`.
        mapper: with a fresh link for every donor; not running yet.
        make_link: for a donor that is no longer listed but still has slabs of this device.
    """
    places, links = _places(engine), mapper.known_donors.links
    for info in engine.remotes():
        mapped = places.get(info.remote, {})
        known = decode_record(engine.remote_record(info.remote))
        if known is None:
            _abandon(engine, mapper, info.remote, mapped)
            continue
        address, lease = known
        link = next((link for link in links if link.address == address), None)
        if link is None:
            link = make_link(address)
            links.append(link)
        log.info("donor %s: %s of a process that ended", address, counted(len(mapped), "slab"))
        link.inherit(info.remote, lease, mapped)


def _places(engine: Engine) -> dict[int, dict[int, Place]]:
    """By remote and slab; a slab that migrates is at two of them."""
    places: dict[int, dict[int, Place]] = {}
    for number, slab in enumerate(engine.slabs()):
        for remote, slot, generation in (
            (slab.source_remote, slab.source_slot, slab.source_generation),
            (slab.remote, slab.slot, slab.generation),
        ):
            if remote is not None:
                places.setdefault(remote, {})[number] = Place(slot, generation)
    return places


def _abandon(engine: Engine, mapper: SlabMapper, remote: int, mapped: dict[int, Place]) -> None:
    """Its donor is unknown: the lease expires, and the slabs get other donors."""
    log.error("a donor's record is unreadable; given up: %s", counted(len(mapped), "slab"))
    for slab, place in mapped.items():
        engine.slab_unmap(slab, remote, place.generation)
        mapper.lost(slab)
    engine.remote_destroy(remote)
