# SPDX-License-Identifier: Apache-2.0
"""Findings about RDMA: devices, ports, addresses, limits, and what leads to the donors."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

from infiniswap.cli.findings import Finding, degraded, good, missing
from infiniswap.config import Config
from infiniswap.engine.protocol import RdmaPort
from infiniswap.errors import EngineError
from infiniswap.units import MIB, format_size_short

_LOCKED_BYTES_MIN = 64 * MIB
"""Less memory than this that may be locked is too little for a device's staging buffers."""
_SOFT_ROCE = "modprobe rdma_rxe; rdma link add rxe0 type rxe netdev INTERFACE (docs/rdma.md)"
_MENDS = {
    errno.EOPNOTSUPP: "apt install libibverbs-dev && make setup",
    errno.ENOENT: "apt install libibverbs1 ibverbs-providers",
    errno.ENOSYS: "modprobe ib_uverbs",
}


def rdma(config: Config) -> Iterator[Finding]:
    """Every port, and which of them leads to each donor. Without any, pages go over TCP."""
    from infiniswap.engine.native_rdma import rdma_ports

    try:
        ports = rdma_ports()
    except EngineError as error:
        mend = _MENDS.get(error.code, _SOFT_ROCE)
        if config.device.transport == "rdma":
            yield missing("rdma", f"{_reason(error)}, and device.transport asks for it", mend)
        elif error.code == errno.ENODEV or config.device.transport == "tcp":
            yield good("rdma", f"{_reason(error)}; pages go over TCP")
        else:
            yield degraded("rdma", f"{_reason(error)}; pages go over TCP", mend)
        return
    for port in ports:
        yield _port(port)
    yield _locked()
    for donor in config.peers():
        yield _way(donor.host)


def _port(port: RdmaPort) -> Finding:
    addresses = [gid.address for gid in port.gids if gid.is_roce_v2]
    name = f"{port.device} port {port.port}"
    what = (
        f"{name}: {port.link}, MTU {port.mtu_bytes}, "
        f"{port.connections_max} connections, {port.regions_max} regions"
    )
    if not port.is_active:
        return degraded("rdma", f"{name} is down", "ip link set INTERFACE up")
    if port.link == "Ethernet" and not addresses:
        return degraded(
            "rdma", f"{what}; it has no RoCE v2 address", "ip address add ADDRESS dev INTERFACE"
        )
    where = f"; RoCE v2 at {', '.join(addresses)}" if addresses else ""
    return good("rdma", f"{what}{where}")


def _locked() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return good("rdma-memlock", "memory may be locked without limit")
    what = f"{format_size_short(soft)} of memory may be locked by this user"
    if soft >= _LOCKED_BYTES_MIN:
        return good("rdma-memlock", what)
    return degraded("rdma-memlock", f"{what}: too little for RDMA", "ulimit -l unlimited")


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
