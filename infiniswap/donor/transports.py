# SPDX-License-Identifier: Apache-2.0
"""What a donor's side of a transport is, for those that need more of a donor than TCP does."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import ClassVar, Protocol


class DonorTransport(Protocol):
    """One transport by which consumers reach this donor's slabs; see DonorService.transports.

    Attributes:
        name: in announcements.
        enabled: whether it is offered.
    """

    name: ClassVar[str]
    enabled: bool

    async def is_usable(self) -> bool:
        """Whether this host could serve a consumer by it now."""

    async def keep_ready(self, background: Executor) -> None:
        """Runs as long as the donor serves: prepares slabs, and ends what was switched off."""
