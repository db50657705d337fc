# SPDX-License-Identifier: Apache-2.0
"""A device's parts, made of its spec."""

from __future__ import annotations

import random

from infiniswap.control.client import ClientConfig, Identity
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.engine.protocol import Engine
from infiniswap.policy.ahead import MapAhead
from infiniswap.policy.refill import Refill
from infiniswap.units import PAGE_BYTES


def make_mapper(spec: DeviceSpec, engine: Engine, now_s: float) -> SlabMapper:
    """The mapper, without links."""
    device = spec.config.device
    slab_pages = device.slab_bytes // PAGE_BYTES
    return SlabMapper(
        engine,
        spec.slab_count,
        spec.config.policy,
        random.Random(),
        now_s,
        Refill(0.0 if spec.backup is None else device.refill_pages_per_s, now_s),
        slab_pages,
        # What outlives its jobs binds late: a host's swap space is mostly idle (docs/adr/0030).
        MapAhead(spec.slab_count, slab_pages) if spec.ephemeral and spec.backup else None,
    )


def make_link_config(spec: DeviceSpec, identity: Identity, client: ClientConfig) -> LinkConfig:
    """What links to donors need to know."""
    return LinkConfig(
        identity=identity,
        client=client,
        device=spec.config.device,
        suspend_s=spec.config.policy.suspend_s,
        slab_count=spec.slab_count,
        has_backup=spec.backup is not None,
    )
