# SPDX-License-Identifier: Apache-2.0
"""RDMA as the rest of the package knows it: typed protocols and plain records.

`infiniswap.engine.native_rdma` implements them on the C extension. Blocking methods and errors: see
`infiniswap.engine.protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infiniswap.engine.protocol import Connector
from infiniswap.rdma_address import RdmaEnd, RdmaKey


@dataclass(frozen=True, slots=True)
class RdmaGid:
    """An address of an RDMA port; the product uses only those of RoCE v2."""

    index: int
    address: str
    is_roce_v2: bool


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device of this host (struct isw_rdma_port)."""

    device: str
    port: int
    link: str
    is_active: bool
    mtu_bytes: int
    regions_max: int
    connections_max: int
    gids: tuple[RdmaGid, ...]

    @property
    def is_usable(self) -> bool:
        """Whether it leads anywhere: up, with an address on Ethernet (InfiniBand needs none)."""
        if self.link == "Ethernet":
            return self.is_active and any(gid.is_roce_v2 for gid in self.gids)
        return self.is_active and self.link == "InfiniBand"


class RdmaOffer(Protocol):
    """A device's half of RDMA connections to a donor."""

    @property
    def ends(self) -> tuple[RdmaEnd, ...]:
        """What the donor must know of our ends."""

    def answered(self, ends: Sequence[RdmaEnd], probe: RdmaKey) -> Connector:
        """How to connect, after the donor has answered with its ends and a page to read."""

    def close(self) -> None:
        """Blocking, idempotent: ends it, unless connections were made of it."""


class EngineRdma(Protocol):
    """RDMA of a device's engine."""

    def offer(self, host: str, queues: int, slots: int) -> RdmaOffer:
        """Blocking. Prepares connections to a donor at `host` with a lease of `slots` slots.
        EngineError: why no RDMA leads there."""

    def slot_key(self, remote: int, slot: int, key: RdmaKey) -> None:
        """Tells the engine where a slot of a remote lies, before a slab is mapped or resumed there.
        EngineError ENOTCONN."""

    def let_go(self) -> int:
        """Blocking. Reports remotes down that use an RDMA device which the host is removing, and
        returns how many such devices this call has found. Each device is closed when its remotes
        are reconnected."""
