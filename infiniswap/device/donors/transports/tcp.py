# SPDX-License-Identifier: Apache-2.0
"""Pages over TCP, by the NBD protocol: every donor has it."""

from __future__ import annotations

from infiniswap.device.donors.transports.base import Dial, Target, Transport


class Tcp(Transport):
    """See Transport."""

    name = "tcp"
    label = "TCP"

    async def connect(self, target: Target, dial: Dial, *, is_trial: bool = False) -> int:
        """See Transport."""
        return await self._blocking(lambda: dial(target.config))
