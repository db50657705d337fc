# SPDX-License-Identifier: Apache-2.0
"""How a donor hears that it has a slab again, where DONE alone might not reach it.

A donor that was told to keep a slab no longer waits for the answer to that EVICT. When the same
EVICT arrives a second time and now succeeds, nobody hears its DONE: the slab would stay mapped at
the donor for as long as the lease lives. So the slab is unmapped explicitly, too. The same goes for
a drain whose end came when nobody waited any longer, as on a host that was suspended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import NoReturn

from infiniswap.control import messages as m
from infiniswap.control.client import Session
from infiniswap.device.donors.link_types import Lease, Place
from infiniswap.errors import InfiniswapError, RequestRefusedError


async def give_back(session: Session | None, lease: Lease | None, place: Place) -> None:
    """Tells the donor that nothing is left in flight there.

    Without a session, or when the donor is too busy to hear it, the next renewal of the lease tells
    it.

    Raises:
        SessionLostError, DeadlineError: the donor did not answer.
    """
    if session is None or session.ended is not None or lease is None:
        return
    try:
        await session.unmap(lease.lease, place.slot, place.generation)
    except RequestRefusedError as error:
        if error.reason == m.REFUSED_BUSY:
            session.end()
        # Any other refusal means that the donor has taken the slab already.


async def _give_back_quietly(session: Session | None, lease: Lease, place: Place) -> None:
    with contextlib.suppress(InfiniswapError):
        await give_back(session, lease, place)


class Kept:
    """Slabs that a donor still has when nobody waits for them: it was told to keep them, or their
    drain took too long."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def refuse(self, place: Place, mapped: Iterable[Place]) -> NoReturn:
        """Tells the donor to keep a slab. Only the places in `mapped` stay remembered.

        Raises:
            RequestRefusedError: always.
        """
        self._places = {*self._places.intersection(mapped), place}
        raise RequestRefusedError(
            "the device has no backup, so these pages are nowhere else",
            reason=m.REFUSED_ONLY_COPY,
        )

    async def given_up(self, place: Place, session: Session | None, lease: Lease | None) -> None:
        """A slab was given up after all, and DONE is about to be sent. Raises as give_back."""
        if place in self._places:
            await give_back(session, lease, place)

    def late(
        self, place: Place, session: Session | None, then: Lease | None, now: Lease | None
    ) -> None:
        """Nobody waited for the end of a slab's drain. Unless its lease of `then` is gone, the
        donor is told in the background."""
        if then is not None and now is not None and then.is_same(now):
            task = asyncio.create_task(_give_back_quietly(session, now, place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
