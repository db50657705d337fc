# SPDX-License-Identifier: Apache-2.0
"""isw_rdma_*: ports of this host, and offers; threads: see `infiniswap.engine.native`."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from infiniswap.engine.binding import check, ffi, lib
from infiniswap.engine.protocol import Connector, Engine
from infiniswap.engine.rdma import RdmaGid, RdmaPort
from infiniswap.errors import EngineError
from infiniswap.rdma_address import RdmaEnd, RdmaKey

_PORTS_MAX = 32
_LINKS = {1: "InfiniBand", 2: "Ethernet"}


def rdma_ports() -> list[RdmaPort]:
    """Blocking, any thread. Every port of every RDMA device of this host.

    Raises:
        EngineError: there is none, or this build or host has no RDMA; the text says how to mend it.
    """
    error = ffi.new("struct isw_error *")
    out = ffi.new("struct isw_rdma_port[]", _PORTS_MAX)
    count = check(lib.isw_rdma_ports(out, _PORTS_MAX, error), "no RDMA", error)
    return [_port(out[i]) for i in range(min(count, _PORTS_MAX))]


def preload_rdma() -> None:
    """Blocking, any thread. Loads what RDMA takes, if it is there: a standby's turn comes when
    nothing can be read from a disk."""
    with contextlib.suppress(EngineError):
        rdma_ports()


def rdma_choose(host: str) -> tuple[RdmaPort, str]:
    """Blocking, any thread. The port that leads to a host, and the address it has there.

    Raises:
        EngineError: none does, and why.
    """
    error = ffi.new("struct isw_error *")
    port, gid = ffi.new("struct isw_rdma_port *"), ffi.new("struct isw_rdma_gid *")
    check(lib.isw_rdma_choose(host.encode(), port, gid, error), "no RDMA", error)
    return _port(port[0]), _address(bytes(gid.raw))


def _port(item: Any) -> RdmaPort:
    return RdmaPort(
        device=ffi.string(item.device).decode(errors="replace"),
        port=item.port,
        link=_LINKS.get(item.link, "unknown"),
        is_active=bool(item.active),
        mtu_bytes=item.mtu_bytes,
        regions_max=item.regions_max,
        connections_max=item.qps_max,
        gids=tuple(
            RdmaGid(item.gid[i].index, _address(bytes(item.gid[i].raw)), item.gid[i].type == 1)
            for i in range(item.gids)
        ),
    )


def _address(raw: bytes) -> str:
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def end_from_c(end: Any) -> RdmaEnd:
    return RdmaEnd(
        gid=bytes(end.gid).hex(),
        link=end.link,
        lid=end.lid,
        mtu_bytes=end.mtu_bytes,
        reads_max=end.reads_max,
        number=end.number,
        psn=end.psn,
    )


def ends_to_c(ends: Sequence[RdmaEnd], scope: int = 0) -> Any:
    """An array of struct isw_rdma_end."""
    out = ffi.new("struct isw_rdma_end[]", max(1, len(ends)))
    for item, end in zip(out, ends, strict=False):
        item.gid = list(bytes.fromhex(end.gid))
        for name in ("link", "lid", "mtu_bytes", "reads_max", "number", "psn"):
            setattr(item, name, getattr(end, name))
        item.scope = scope
    return out


def key_from_c(key: Any) -> RdmaKey:
    return RdmaKey(int(key.address), int(key.rkey))


def key_to_c(key: RdmaKey) -> Any:
    return ffi.new("struct isw_rdma_key *", {"address": key.address, "rkey": key.rkey})


class NativeEngineRdma:
    """infiniswap.engine.rdma.EngineRdma on isw_rdma_*."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def offer(self, host: str, queues: int, slots: int) -> NativeRdmaOffer:
        """Blocking, worker thread. EngineError: no RDMA leads there, and why."""
        error = ffi.new("struct isw_error *")
        out = ffi.new("isw_rdma_offer **")
        with self._engine.use() as engine:
            result = lib.isw_rdma_offer_make(engine, host.encode(), queues, slots, out, error)
        check(result, "no RDMA", error)
        return NativeRdmaOffer(out[0], queues)

    def slot_key(self, remote: int, slot: int, key: RdmaKey) -> None:
        """Any thread, never waits for long. EngineError ENOTCONN, EINVAL."""
        with self._engine.use() as engine:
            result = lib.isw_remote_slot_key(engine, remote, slot, key_to_c(key))
        check(result, f"cannot set the key of slot {slot} of remote {remote}")

    def let_go(self) -> int:
        """Blocking, worker thread. How many RDMA devices are being removed, since this call."""
        with self._engine.use() as engine:
            return int(lib.isw_rdma_let_go(engine))


class NativeRdmaOffer:
    """A device's half of RDMA connections, and with the donor's answer a Connector."""

    def __init__(self, pointer: Any, count: int) -> None:
        self._pointer = pointer
        self._answer: dict[str, Any] = {}
        ends = ffi.new("struct isw_rdma_end[]", count)
        for queue in range(count):
            lib.isw_rdma_offer_end(pointer, queue, ends + queue)
        self.ends: tuple[RdmaEnd, ...] = tuple(map(end_from_c, ends))

    def answered(self, ends: Sequence[RdmaEnd], probe: RdmaKey) -> Connector:
        """Any thread, never waits."""
        self._answer = {"rdma_peers": ends_to_c(ends), "rdma_probe": key_to_c(probe)[0]}
        return self

    def fields(self) -> Mapping[str, Any]:
        """See Connector."""
        return {"rdma": self._take(), **self._answer}

    def _take(self) -> Any:
        pointer, self._pointer = self._pointer, ffi.NULL
        return pointer

    def close(self) -> None:
        """Blocking, idempotent: ends it, unless connections were made of it."""
        lib.isw_rdma_offer_destroy(self._take())
