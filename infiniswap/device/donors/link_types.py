# SPDX-License-Identifier: Apache-2.0
"""What a link to a donor knows of the device, and what it asks of the keeper of the slabs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infiniswap.config import DeviceConfig
from infiniswap.control.client import ClientConfig, Identity
from infiniswap.control.messages import DeviceFigures

if TYPE_CHECKING:
    from infiniswap.device.donors.link import DonorLink


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """What links know of the device. `figures`: what it says of itself to donors that ask."""

    identity: Identity
    client: ClientConfig
    device: DeviceConfig
    suspend_s: float
    slab_count: int
    has_backup: bool
    figures: Callable[[], DeviceFigures | None] = lambda: None


class SlabKeeper(Protocol):
    """What a link asks of the object that keeps the device's slabs (the mapper)."""

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        """Resolves when the engine reports the slab's drain."""

    def activity(self, slab: int) -> float:
        """Page I/O per second."""

    def lost(self, slab: int) -> None:
        """The slab has lost its donor, not by the device's choice: it deserves another at once."""

    def arrived(self, slab: int) -> None:
        """The slab has a donor, or has it back. Pages that the donor lacks may be copied there."""

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        """Copies a slab from this donor to another one, for `wait_s` seconds at most.

        Returns:
            Whether every page is there.
        """

    def evicted(self, link: DonorLink, slab: int) -> None:
        """The donor has taken the slab back. The slab deserves another donor at once, and this
        donor gets slabs again later."""

    def distrusted(self, link: DonorLink, why: str) -> None:
        """The donor is given up for its faults: it gets no slab for a while."""

    def avoided(self, link: DonorLink, why: str) -> None:
        """The donor keeps its slabs in spite of its faults, as there is no backup: it gets no
        further ones for a while."""

    def pages_lost(self, pages: int, why: str) -> None:
        """`pages` pages had no other copy; `why` follows "are lost"."""
