# SPDX-License-Identifier: Apache-2.0
"""How much a donor may lend: its configuration on a host with so much memory."""

from __future__ import annotations

from infiniswap.config import Config
from infiniswap.donor.memory import MemoryFigures
from infiniswap.errors import ConfigError
from infiniswap.policy.headroom import HeadroomConfig, pool_bytes_auto
from infiniswap.units import PAGE_BYTES, format_size, format_size_short


def pool_limits(config: Config, figures: MemoryFigures) -> HeadroomConfig:
    """The limits of the pool on a host with this memory.

    Raises:
        ConfigError: not even one slab could ever be lent, or the pool could never be had.
    """
    daemon, policy = config.daemon, config.policy
    kept_bytes = headroom_bytes(config, figures)
    pool_bytes = daemon.pool_bytes
    if pool_bytes is None:
        pool_bytes = pool_bytes_auto(figures.total_bytes, kept_bytes, daemon.slab_bytes)
    if pool_bytes < daemon.slab_bytes:
        raise ConfigError(
            f"{format_size_short(figures.total_bytes)} of memory less "
            f"{format_size_short(kept_bytes)} headroom leave no room for a slab of "
            f"{format_size(daemon.slab_bytes)}",
            where="daemon.pool",
            mend="Make the slab smaller (on every host) or the headroom.",
        )
    if pool_bytes > figures.total_bytes:
        room_bytes = pool_bytes_auto(figures.total_bytes, kept_bytes, daemon.slab_bytes)
        raise ConfigError(
            f"a pool of {format_size(pool_bytes)} is more than the "
            f"{format_size_short(figures.total_bytes)} of memory that there is",
            where="daemon.pool",
            mend=f"Write auto, which lends up to {format_size_short(room_bytes)} here and leaves "
            "the headroom free; or a smaller pool.",
        )
    return HeadroomConfig(
        slab_bytes=daemon.slab_bytes,
        headroom_bytes=kept_bytes,
        pool_bytes_max=pool_bytes,
        hysteresis_bytes=min(daemon.slab_bytes, kept_bytes) // 4,
        free_slabs_max=daemon.preallocate_slabs,
        beta=policy.memory_beta,
        period_s=policy.period_s,
    )


def headroom_bytes(config: Config, figures: MemoryFigures) -> int:
    """What stays free for the programs of a host with this memory, in whole pages."""
    configured = config.daemon.headroom_bytes
    if configured is None:
        # Whole pages, because the releaser gets it as a setting, and that must be a size of pages.
        kept_bytes = int(figures.total_bytes * config.policy.headroom_fraction)
        return kept_bytes - kept_bytes % PAGE_BYTES
    return configured


def pool_note(limits: HeadroomConfig, figures: MemoryFigures) -> str:
    """Why the pool will never be as large as it may be; empty where it can."""
    pool_bytes = limits.slabs_max * limits.slab_bytes
    room_bytes = pool_bytes_auto(figures.total_bytes, limits.headroom_bytes, limits.slab_bytes)
    if pool_bytes <= room_bytes:
        return ""
    return (
        f"daemon.pool allows {format_size_short(pool_bytes)}, but the headroom of "
        f"{format_size_short(limits.headroom_bytes)} leaves {format_size_short(room_bytes)} of "
        f"{format_size_short(figures.total_bytes)} to lend"
    )
