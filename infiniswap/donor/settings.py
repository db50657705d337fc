# SPDX-License-Identifier: Apache-2.0
"""The configuration as the daemon's parts take it: at the start, and when it is read again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from infiniswap.config import Config
from infiniswap.control.channel import Limits
from infiniswap.control.server import ServerConfig
from infiniswap.donor.evict import EvictionConfig
from infiniswap.donor.leases import ALONE_S
from infiniswap.engine.protocol import StoreConfig
from infiniswap.policy.headroom import HeadroomConfig


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Limits of a donor's service.

    Attributes:
        slab_bytes: size of a slab.
        pool_bytes: most memory ever lent.
        grace_s, leases_max, alone_s: see LeaseTable.
        connections_per_host_max: see infiniswap.donor.leases.consumer_leases.
        heartbeat_s: told to consumers.
        silence_s: told to consumers.
        authenticated: whether a cluster secret is in force.
        fence_ms: how long a renewal or unmap waits for requests under way.
        eviction: bounds of a batch eviction.
        drain_move_s: how long a consumer may take to copy a slab elsewhere while this donor drains.
        consumer_share_max: of the pool, what one consumer may keep while others need memory.
        state_dir: for what outlives the daemon; None: nothing does.
        listen_port: of the control API as configured; 0: another after each start.
        rdma: whether RDMA is offered.
        prepare_s: how long a map request waits for a slab to be allocated. Shorter than the
            consumer waits for its answer, so that it gets one.
    """

    slab_bytes: int
    pool_bytes: int
    grace_s: float = 10.0
    leases_max: int = 256
    connections_per_host_max: int = 128
    alone_s: float = ALONE_S
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    authenticated: bool = False
    fence_ms: int = 5_000
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    drain_move_s: float = 60.0
    consumer_share_max: float = 0.5
    state_dir: Path | None = None
    listen_port: int = 0
    rdma: bool = True
    prepare_s: float = 1.5


def service_config(config: Config, limits: HeadroomConfig, *, authenticated: bool) -> ServiceConfig:
    """Of the service, with a pool of these limits."""
    daemon, cluster = config.daemon, config.cluster
    return ServiceConfig(
        slab_bytes=limits.slab_bytes,
        pool_bytes=limits.slabs_max * limits.slab_bytes,
        grace_s=daemon.lease_grace_s,
        leases_max=daemon.leases_max,
        connections_per_host_max=daemon.connections_per_host_max,
        heartbeat_s=cluster.heartbeat_s,
        silence_s=cluster.heartbeat_s * cluster.heartbeats_missed_max,
        authenticated=authenticated,
        eviction=EvictionConfig(
            slabs_max=config.policy.evict_slabs_max,
            extra=config.policy.evict_extra_slabs,
            deadline_s=daemon.evict_deadline_s,
            move_s=daemon.evict_move_s,
        ),
        drain_move_s=daemon.drain_move_s,
        consumer_share_max=daemon.consumer_share_max,
        state_dir=daemon.state_dir,
        listen_port=daemon.listen.port,
        rdma=daemon.rdma == "auto",
    )


def store_config(config: Config, limits: HeadroomConfig, slab_dir: Path | None) -> StoreConfig:
    """Of the store.

    Args:
        config: the configuration.
        limits: of the pool.
        slab_dir: where slabs outlive the daemon; None: they do not.
    """
    daemon = config.daemon
    return StoreConfig(
        slab_bytes=daemon.slab_bytes,
        slabs_max=limits.slabs_max,
        leases_max=daemon.leases_max,
        connections_max=daemon.connections_max,
        connections_per_lease_max=daemon.connections_per_lease_max,
        connections_per_host_max=daemon.connections_per_host_max,
        slab_dir=None if slab_dir is None else str(slab_dir),
    )


def server_config(config: Config, stop_s: float, handshake_s: float) -> ServerConfig:
    """Of the control API. Reads the secret and the token of the metrics.

    Raises:
        ConfigError: they cannot be read.
    """
    cluster = config.cluster
    return ServerConfig(
        secret=config.secret(),
        limits=Limits(heartbeat_s=cluster.heartbeat_s, missed_max=cluster.heartbeats_missed_max),
        handshake_s=handshake_s,
        connections_per_host_max=config.daemon.connections_per_host_max,
        stop_s=stop_s,
        metrics_token=config.metrics_token(),
    )
