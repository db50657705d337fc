# SPDX-License-Identifier: Apache-2.0
"""What a link to a donor is made of, and what it asks of the device's slab bookkeeping."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infiniswap.config import DeviceConfig
from infiniswap.control import messages as m
from infiniswap.control.client import ClientConfig, Identity
from infiniswap.engine.protocol import RemoteConfig
from infiniswap.errors import InfiniswapError, RequestRefusedError
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from infiniswap.device.donors.link import DonorLink


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease a link holds.

    Attributes:
        peer: where it was granted or renewed last: the donor's address in figures, or empty. Names
            may be what nobody can resolve any more when the lease has to be reclaimed.
    """

    lease: int
    reclaim: str
    epoch: int
    token: str
    export_bytes: int
    incarnation: str
    peer: str = ""

    def is_same(self, other: Lease) -> bool:
        """Whether it is that lease, renewed or not."""
        return (self.lease, self.incarnation) == (other.lease, other.incarnation)

    @classmethod
    def granted(cls, answer: m.LeaseAnswer, incarnation: str, peer: str) -> Lease:
        """As a donor of that incarnation has just granted it."""
        return cls(
            lease=answer.lease,
            reclaim=answer.reclaim,
            epoch=answer.epoch,
            token=answer.token,
            export_bytes=answer.export_bytes,
            incarnation=incarnation,
            peer=peer,
        )


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """What links need to know of the device."""

    identity: Identity
    client: ClientConfig
    device: DeviceConfig
    suspend_s: float
    slab_count: int
    has_backup: bool

    def remote(self, data: HostPort, lease: Lease) -> RemoteConfig:
        """How a donor whose data port that is is connected to, by TCP."""
        return RemoteConfig(
            host=data.host,
            port=data.port,
            token=lease.token,
            export_bytes=lease.export_bytes,
            queues=self.device.queues,
            connect_ms_max=self.device.connect_ms,
            request_ms_max=self.device.request_ms,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slab is: slot and generation on the donor."""

    slot: int
    generation: int


class LeaseGoneError(InfiniswapError):
    """The lease cannot be reclaimed: the donor has forgotten it."""


def is_gone(error: Exception) -> bool:
    """Whether a reclaim that failed so is of no use once more: a donor that is busy may not be."""
    if isinstance(error, RequestRefusedError):
        return error.reason != m.REFUSED_BUSY
    return isinstance(error, LeaseGoneError)


class Slabs(Protocol):
    """What a link asks of the device's slab bookkeeping (the mapper)."""

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        """Resolves when the engine reports the slab's drain."""

    def activity(self, slab: int) -> float:
        """Page I/O per second."""

    def lost(self, slab: int) -> None:
        """The slab has no donor any more, not by our choice: worth another one at once."""

    def arrived(self, slab: int) -> None:
        """The slab has a donor, or has it back; what it lacks may be copied there."""

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        """Copies a slab from this donor to another one, for so long at most.

        Returns:
            Whether every page is there.
        """

    def evicted(self, link: DonorLink, slab: int) -> None:
        """The donor has taken the slab back: worth another donor at once, this one later."""

    def distrusted(self, link: DonorLink, why: str) -> None:
        """The donor is given up for what it did: no slab there for a while."""

    def pages_lost(self, pages: int) -> None:
        """So many pages had no other copy."""
