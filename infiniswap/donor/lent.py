# SPDX-License-Identifier: Apache-2.0
"""The slabs that are lent, and how one is taken back from its device."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.service import ServerSession
from infiniswap.donor.evict import MappedSlab
from infiniswap.donor.lease_work import FENCE_MS, LeaseWork
from infiniswap.donor.leases import LeaseState, LeaseTable
from infiniswap.donor.sessions import Sessions
from infiniswap.engine.store import Store
from infiniswap.errors import (
    InfiniswapError,
    NotFoundError,
    RequestRefusedError,
    SessionLostError,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LentSlabs:
    """Every slab in a slot of a lease (infiniswap.donor.evict.SlabOwners).

    Attributes:
        counters: evictions, evictions_forced, evictions_refused, evictions_last_copies.
    """

    table: LeaseTable
    sessions: Sessions
    store: Store
    work: LeaseWork
    counters: Counter[str]

    def mapped(self) -> list[MappedSlab]:
        """Every slab that is lent."""
        return [
            (lease.lease, slot)
            for lease in self.table.leases()
            if lease.state is not LeaseState.EXPIRED
            for slot in lease.slots
        ]

    async def activity(self, lease: int, wait_s: float) -> dict[int, float]:
        """Page I/O per second by slot, as the owner of the lease says.

        Raises:
            InfiniswapError: it did not say.
        """
        session = self.sessions.owner_of(lease)
        if session is None:
            raise NotFoundError(f"the device of lease {lease} is not connected")
        answer = await session.activity(lease, wait_s)
        return {entry.slot: entry.pages_per_s for entry in answer.slots}

    async def evict(
        self, lease: int, slot: int, deadline_ms: int, move_ms: int = 0, *, last_copy: bool = False
    ) -> bool:
        """Takes a slab back: asks its owner for DONE, and fences the slab without it after the
        deadline.

        Before that its owner may copy the slab elsewhere, for `move_ms` more.

        Args:
            last_copy: whatever the owner says. It is told so, for its alarm.

        Returns:
            False when the owner keeps it: it holds the only copy, or it cannot be asked and there
            is no hurry. True with `last_copy`.

        Raises:
            EngineError: the store could not.
        """
        entry = self.table.get(lease)
        info = entry.slots.get(slot) if entry else None
        if info is None:
            return True
        session = self.sessions.owner_of(lease)
        wait_ms = 0
        may_stay = bool(move_ms) and not last_copy
        if session is None and may_stay and entry and entry.state is LeaseState.ACTIVE:
            return False  # no hurry: its device pages on, and is asked again when it is back
        if session is not None:
            try:
                await session.evict(
                    *(lease, slot, info.generation, deadline_ms + move_ms, move_ms),
                    last_copy=last_copy,
                )
                wait_ms = FENCE_MS
            except RequestRefusedError as error:
                if error.reason == m.REFUSED_ONLY_COPY and not last_copy:
                    self.counters["evictions_refused"] += 1
                    about = events.about(events.SLAB_KEPT)
                    log.warning("%s keeps slab %d: %s", session, info.slab, error, extra=about)
                    return False
                _not_given_up(session, info.slab, error)
            except InfiniswapError as error:
                back = isinstance(error, SessionLostError) and self.sessions.owner_of(lease)
                if back and back is not session:  # it can be asked again, and may have renewed
                    return await self.evict(lease, slot, deadline_ms, move_ms, last_copy=last_copy)
                if may_stay and isinstance(error, SessionLostError):
                    log.info("%s has gone while it copies slab %d: %s", session, info.slab, error)
                    return False  # likewise; it goes on copying
                _not_given_up(session, info.slab, error)
        if last_copy:
            self.counters["evictions_last_copies"] += 1
            log.warning(
                "slab %d of lease %d is taken back although its device says that it has the only "
                "copy",
                *(info.slab, lease),
                extra=events.about(events.LAST_COPY_TAKEN),
            )
        await self.work.whole(self._fence(lease, info, wait_ms), lease)
        return True

    async def _fence(self, lease: int, info: m.SlotInfo, wait_ms: int) -> None:
        entry = self.table.get(lease)
        if entry is None or entry.slots.get(info.slot) != info:
            return  # given back in the meantime
        await self.work.off_loop(
            lambda: self.store.unmap(lease, info.slot, info.generation, wait_ms)
        )
        self.table.unmapped(lease, info.slot)
        self.counters["evictions"] += 1
        self.counters["evictions_forced"] += not wait_ms


def _not_given_up(session: ServerSession, slab: int, error: Exception) -> None:
    about = events.about(events.SLAB_FORCED)
    log.warning("%s did not give slab %d up: %s", session, slab, error, extra=about)
