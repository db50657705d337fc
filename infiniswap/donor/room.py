# SPDX-License-Identifier: Apache-2.0
"""Why a donor lends nothing more, in the words that its consumers show."""

from __future__ import annotations

from infiniswap.donor.harvest import Harvester
from infiniswap.units import format_size, format_size_short


def no_room(harvester: Harvester, *, draining: bool) -> str:
    """A clause without a subject, which is the donor; empty when a slab could be lent."""
    config, figures = harvester.policy.config, harvester.figures
    if draining:
        return "is drained (`infiniswap donor undrain HOST` ends that)"
    if harvester.slabs_mappable() and not harvester.is_short:
        return ""
    if not figures.total_bytes:
        return "has not measured its memory yet"
    pool = harvester.pool()
    if pool.mapped >= config.slabs_max:
        size = format_size_short(config.pool_bytes_max)
        return f"has lent its whole pool of {size} (daemon.pool there), {pool.mapped} slabs"
    pool_bytes = pool.total * config.slab_bytes
    usual_bytes = figures.total_bytes - harvester.policy.others_bytes - pool_bytes
    now_bytes = figures.available_bytes - harvester.cache_bytes
    available = format_size_short(max(0, min(usual_bytes, now_bytes)))
    if pool.total >= config.slabs_max:
        return "zeroes the slabs that have come back: try again in a moment"
    if harvester.is_refused:
        return f"gets no memory for another slab from its host, where {available} are available"
    return (
        f"needs its memory itself: {available} are available there, it keeps "
        f"{format_size_short(config.headroom_bytes)} as headroom (daemon.headroom), and a slab "
        f"takes {format_size(config.slab_bytes)}"
    )
