# SPDX-License-Identifier: Apache-2.0
"""What devices say of the slabs that they have here, and of themselves: for the status alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from infiniswap.control import messages as m
from infiniswap.control.service import ServerSession
from infiniswap.donor.leases import GrantedLease, LeaseTable
from infiniswap.donor.sessions import Sessions
from infiniswap.errors import InfiniswapError

FRESH_S: Final = 1.0
"""However many ask for the status, devices are asked no more often than this."""
WAIT_S: Final = 0.3
"""How long a status waits for them."""
SILENT_S: Final = 10.0
"""A device that has not answered is left alone for this long: no status waits for it."""
SLABS_LISTED_MAX: Final = 16_384
"""Lent slabs that a status lists; a donor that lends more lists none. They take less than half of
the longest message."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a device said last.

    Attributes:
        pages_per_s: by slot.
        device: of itself.
    """

    pages_per_s: Mapping[int, float] = field(default_factory=dict)
    device: m.DeviceFigures | None = None


_NOTHING: Final = Said()


class Heat:
    """Asks devices, and keeps their answers.

    Args:
        table: leases.
        sessions: of their devices.
        clock: seconds, monotonic.
    """

    def __init__(self, table: LeaseTable, sessions: Sessions, clock: Callable[[], float]) -> None:
        self._table = table
        self._sessions = sessions
        self._clock = clock
        self._said: dict[int, Said] = {}
        self._silent_until_s: dict[int, float] = {}
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()

    def said(self, lease: int) -> Said:
        """Of the device that holds the lease."""
        return self._said.get(lease, _NOTHING)

    def slabs(self, lease: GrantedLease) -> list[m.SlabUse]:
        """The slabs of a lease, by their number."""
        rates = self.said(lease.lease).pages_per_s
        found = [m.SlabUse(info.slab, rates.get(slot)) for slot, info in lease.slots.items()]
        return sorted(found, key=lambda one: one.slab)

    async def refresh(self) -> None:
        """Asks every device that is connected and has slabs here. Bounded by WAIT_S."""
        async with self._asking:
            now_s = self._clock()
            if now_s - self._asked_s < FRESH_S:
                return
            self._asked_s = now_s
            asked = {
                lease.lease: session
                for lease in self._table.leases()
                if lease.slots
                and now_s >= self._silent_until_s.get(lease.lease, now_s)
                and (session := self._sessions.owner_of(lease.lease)) is not None
            }
            found = await asyncio.gather(*(self._ask(*one) for one in asked.items()))
            self._silent_until_s = {
                lease: until_s for lease, until_s in self._silent_until_s.items() if until_s > now_s
            }
            for lease, said in zip(asked, found, strict=True):
                if said is None:
                    self._silent_until_s[lease] = now_s + SILENT_S
            self._said = {lease: said for lease, said in zip(asked, found, strict=True) if said}

    async def _ask(self, lease: int, session: ServerSession) -> Said | None:
        try:
            answer = await session.activity(lease, WAIT_S)
        except InfiniswapError:
            return None
        rates = {entry.slot: round(entry.pages_per_s, 1) for entry in answer.slots}
        return Said(rates, answer.device)
