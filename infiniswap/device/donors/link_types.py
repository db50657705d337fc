# SPDX-License-Identifier: Apache-2.0
"""What a link to a donor must know of the device, and what it asks of whoever keeps the slabs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infiniswap.config import DeviceConfig
from infiniswap.control.client import ClientConfig, Identity

if TYPE_CHECKING:
    from infiniswap.device.donors.link import DonorLink


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """What links need to know of the device."""

    identity: Identity
    client: ClientConfig
    device: DeviceConfig
    suspend_s: float
    slab_count: int
    has_backup: bool


class SlabKeeper(Protocol):
    """What a link asks of the one who keeps the device's slabs (the mapper)."""

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        """Resolves when the engine reports the slab's drain."""

    def activity(self, slab: int) -> float:
        """Page I/O per second."""

    def lost(self, slab: int) -> None:
        """The slab has lost its donor, not by our choice: worth another one at once."""

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
