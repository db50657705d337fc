# SPDX-License-Identifier: Apache-2.0
"""Findings about RDMA: devices, ports, addresses, limits, and what leads to the donors."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

from infiniswap.cli.doctor.finding import Finding, degraded, good, missing
from infiniswap.config import Config
from infiniswap.documents import page
from infiniswap.engine.rdma import RdmaPort
from infiniswap.errors import ConfigError, EngineError
from infiniswap.system import rdma as system
from infiniswap.units import MIB, PAGE_BYTES, counted, format_size_short

_LOCKED_PER_CONNECTION = 2 * MIB
"""What READs land in, for each connection to a donor (RDMA_BOUNCE_BYTES)."""
_LOCKED_PER_LEASE = PAGE_BYTES
"""What a device reads to see whether RDMA works (csrc/store/rdma.c)."""
_MORE_LOCKED = (
    "ulimit -l unlimited (for good: memlock in /etc/security/limits.conf, "
    "LimitMEMLOCK=infinity in a unit)"
)
_PROVIDER = "apt install ibverbs-providers"
_SOFT_ROCE = f"modprobe rdma_rxe; rdma link add rxe0 type rxe netdev INTERFACE ({page('rdma.md')})"
_MENDS = {
    errno.EOPNOTSUPP: "apt install libibverbs-dev; then install Infiniswap again",
    errno.ENOENT: "apt install libibverbs1 ibverbs-providers",
    errno.ENOSYS: "modprobe ib_uverbs",
}


def rdma(config: Config) -> Iterator[Finding]:
    """Every port, and which of them leads to each donor. Without any, pages go over TCP."""
    from infiniswap.engine.native_rdma import rdma_ports

    there = system.devices()
    try:
        ports = rdma_ports()
    except EngineError as error:
        mend = _MENDS.get(error.code, _PROVIDER if there else _SOFT_ROCE)
        if config.device.transport == "rdma":
            yield missing("rdma", f"{_reason(error)}, and device.transport asks for it", mend)
        elif (error.code == errno.ENODEV and not there) or config.device.transport == "tcp":
            yield good("rdma", f"{_reason(error)}; pages go over TCP")
        else:
            yield degraded("rdma", f"{_reason(error)}; pages go over TCP", mend)
        return
    for port in ports:
        yield _port(port)
    for name in sorted(set(there) - {port.device for port in ports}):
        yield degraded("rdma", f"no program can use {name}: its provider is missing", _PROVIDER)
    yield from _locked(config)
    for donor in config.peers():
        yield _way(donor.host)


def _port(port: RdmaPort) -> Finding:
    addresses = [gid.address for gid in port.gids if gid.is_roce_v2]
    name = f"{port.device} port {port.port}"
    what = (
        f"{name}: {port.link}, MTU {port.mtu_bytes}, "
        f"{counted(port.connections_max, 'connection')}, {counted(port.regions_max, 'region')}"
    )
    if port.link != "Ethernet":
        if port.is_active:
            return good("rdma", what)
        return degraded(
            "rdma", f"{name} is down", "check its cable; start a subnet manager (opensm)"
        )
    interface = system.interface(port.device, port.port) or "INTERFACE"
    if not port.is_active:
        return degraded("rdma", f"{name} is down", f"ip link set {interface} up")
    if not addresses:
        return degraded(
            "rdma",
            f"{what}; it has no RoCE v2 address",
            f"ip address add ADDRESS dev {interface}",
        )
    return good("rdma", f"{what}; RoCE v2 at {', '.join(addresses)}")


def _locked(config: Config) -> Iterator[Finding]:
    """What one process may lock, against what a device registers, and what a daemon does."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or system.locks_without_limit():
        yield good("rdma-memlock", "memory may be locked without limit")
        return
    device = config.device
    needed = device.staging_bytes + device.queues * _LOCKED_PER_CONNECTION
    what = f"{format_size_short(soft)} of memory may be locked by this user"
    if soft >= needed:
        yield good("rdma-memlock", what)
    else:
        yield degraded(
            "rdma-memlock",
            f"{what}: too little for RDMA, which takes {format_size_short(needed)} and "
            f"{format_size_short(device.queues * _LOCKED_PER_CONNECTION)} for each further donor",
            _MORE_LOCKED,
        )
    yield from _locked_pool(config, soft, what)


def _locked_pool(config: Config, soft: int, what: str) -> Iterator[Finding]:
    """Only where this host's configuration makes it a donor for others, by RDMA, too."""
    daemon = config.daemon
    if daemon.listen.is_loopback or daemon.rdma == "off":
        return
    from infiniswap.donor.memory import HostMemorySource
    from infiniswap.donor.pool_limits import pool_limits

    try:
        slabs = pool_limits(config, HostMemorySource().read()).slabs_max
    except ConfigError:
        return  # there is no room for a slab: that daemon would not start
    pool_bytes = slabs * daemon.slab_bytes
    pool = f"a pool of {format_size_short(pool_bytes)} (daemon.pool)"
    if soft >= pool_bytes + daemon.leases_max * _LOCKED_PER_LEASE:
        yield good("rdma-memlock", f"{what}, enough for {pool}")
        return
    yield degraded(
        "rdma-memlock",
        f"{what}: too little to register {pool} for RDMA, so not all of it can be lent that way",
        _MORE_LOCKED,
    )


def _way(host: str) -> Finding:
    from infiniswap.engine.native_rdma import rdma_choose

    try:
        port, address = rdma_choose(host)
    except EngineError as error:
        return degraded(
            "rdma-donor", f"{host}: {_reason(error)}; its pages go over TCP", _SOFT_ROCE
        )
    return good("rdma-donor", f"{host}: by {port.device} port {port.port} from {address}")


def _reason(error: EngineError) -> str:
    return error.what.removeprefix("no RDMA: ")
