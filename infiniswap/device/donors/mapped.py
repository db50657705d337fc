# SPDX-License-Identifier: Apache-2.0
"""The slabs that are mapped at one donor, and how each of them leaves it.

A slab leaves by a drain: the engine sends nothing more there, the requests in flight end, and the
donor is told. The answer to an EVICT, DONE, tells it; otherwise the slab is unmapped explicitly.
It is also unmapped explicitly if the donor may not hear DONE: a donor that was told to keep a slab
no longer waits for the answer to that EVICT. If the same EVICT then arrives a second time and
succeeds, the slab would stay mapped at the donor as long as the lease lives. The same holds for a
drain that ended while no task waited for it, as on a host that was suspended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from infiniswap.control import messages as m
from infiniswap.control.client import Session
from infiniswap.device.donors.lease import HeldLease, Place
from infiniswap.device.donors.link_types import SlabKeeper
from infiniswap.device.off_loop import while_going_on
from infiniswap.engine.protocol import Engine
from infiniswap.errors import (
    DeadlineError,
    EngineError,
    InfiniswapError,
    NoDonorError,
    RequestRefusedError,
    SessionLostError,
)
from infiniswap.policy.donor_faults import DonorFaults

if TYPE_CHECKING:
    from infiniswap.device.donors.link import DonorLink

log = logging.getLogger(__name__)

_DRAIN_S_MAX = 30.0


class MappedSlabs:
    """The slabs of one link. Everything on the event loop.

    Args:
        link: whose slabs they are, for the keeper.
        engine: sends the pages.
        keeper: of the device's slabs.
        faults: told of what the donor announces.

    Attributes:
        places: by slab.
    """

    def __init__(
        self,
        link: DonorLink,
        engine: Engine,
        keeper: SlabKeeper,
        faults: DonorFaults,
    ) -> None:
        self.places: dict[int, Place] = {}
        self._link = link
        self._address = link.address
        self._engine = engine
        self._keeper = keeper
        self._session = link.session
        self._connections = link.connections
        self._faults = faults
        self._refused: set[Place] = set()  # the donor was told to keep these
        self._telling: set[asyncio.Task[None]] = set()
        self._arriving: asyncio.Future[None] | None = None  # until the answer to a map is here

    # ---------------------------------------------------------------------- to the donor

    async def map(self, session: Session, slab: int, *, migrates: bool, ahead: bool) -> None:
        """Puts a slab there and tells the engine. The link is connected.

        Raises:
            InfiniswapError: the donor refused, or is unreachable. Nothing has changed.
        """
        lease, remote = self._connections.lease, self._connections.remote
        assert lease is not None
        assert remote is not None
        if slab in self.places:
            # If it were asked again, the donor would name the same slot again.
            raise NoDonorError(f"it has slab {slab} already", where=f"donor {self._address}")
        put = self._engine.slab_migrate if migrates else self._engine.slab_map
        arriving = self._arriving = asyncio.get_running_loop().create_future()
        try:
            try:
                answer = await session.map(lease.lease, slab, ahead=ahead)
                self._connections.transport.mapped(remote, answer)
                put(slab, remote, answer.slot, answer.generation)
                self.places[slab] = Place(answer.slot, answer.generation)
            finally:  # before anything below that waits for the handlers of evictions
                self._arriving = None
                arriving.set_result(None)
        except RequestRefusedError as error:
            if error.reason == m.REFUSED_BUSY:  # it cuts the connections, for others to come
                self._faults.announce(-1, asyncio.get_running_loop().time(), 0.0)
            raise
        except DeadlineError:
            # The slab may be mapped there unknown to us. A renewal tells, and gives such a slab
            # back; it needs a new session.
            await session.close()
            raise
        except EngineError:
            # The remote went down meanwhile: the slot is given back with the lease.
            with contextlib.suppress(InfiniswapError):
                await session.unmap(lease.lease, answer.slot, answer.generation)
            raise
        self._keeper.arrived(slab)

    async def keep(self, slab: int) -> bool:
        """Tells the donor that a slab mapped ahead is in use. False or InfiniswapError: it does not
        know yet."""
        place, session, lease = (
            self.places.get(slab),
            self._session.current,
            self._connections.lease,
        )
        if place is None or session is None or session.ended is not None or lease is None:
            return place is None
        with contextlib.suppress(RequestRefusedError):  # the slab is no longer there
            await session.keep(lease.lease, place.slot, place.generation)
        return True

    async def unmap(self, slab: int, reason: str) -> bool:
        """Drains a slab and tells the donor. Ends when both are done.

        Returns:
            Whether this call took it off; else an eviction did, or it was not there.

        Raises:
            TimeoutError: requests are still in flight there.
            InfiniswapError: the donor did not answer.
        """
        place = self.places.get(slab)
        if place is None:
            return False
        is_first = await self._drain(slab, place, _DRAIN_S_MAX)
        log.info("slab %d: off donor %s (%s)", slab, self._address, reason)
        await self._tell(place)
        return is_first

    async def abandon(self, slab: int) -> None:
        """Drains a slab whose copy there is gone; the donor is not told.

        Raises:
            TimeoutError: requests are still in flight there.
        """
        place = self.places.get(slab)
        if place is not None:  # an eviction's drain may have ended meanwhile
            await self._drain(slab, place, _DRAIN_S_MAX)
        self._keeper.lost(slab)

    # --------------------------------------------------------------------- by the donor

    async def evict(
        self,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        """The donor takes a slab back; the return of this method is DONE.

        Raises:
            RequestRefusedError: without a backup its pages are nowhere else, and the donor would
                respect that (not `last_copy`).
            TimeoutError: requests are still in flight there at the deadline.
            SessionLostError: there is no session for the answer.
        """
        if not self._in(slot, generation) and self._arriving is not None:
            # The answer to a map may have arrived, before its task could note the slab.
            await asyncio.wait({self._arriving}, timeout=deadline_s)
        # Past the deadline the donor may take it by force, which costs the connections.
        self._faults.announce(generation, asyncio.get_running_loop().time(), deadline_s)
        for slab, place in self._in(slot, generation):
            moved = await self._move(slab, move_s)
            is_only = not moved and not self._connections.config.has_backup
            if is_only and not last_copy:
                self._refused = {*self._refused.intersection(self.places.values()), place}
                raise RequestRefusedError(
                    "the device has no backup, so these pages are nowhere else",
                    reason=m.REFUSED_ONLY_COPY,
                )
            if self.places.get(slab) != place:
                continue  # a repeated request: it has gone meanwhile, or has come back since
            try:
                wait_s = max(deadline_s - move_s, 0.1)
                is_first = await self._drain(slab, place, wait_s, is_taken=is_only)
            except TimeoutError:
                self._keeper.evicted(self._link, slab)  # past the deadline it is taken anyway
                raise
            if is_first:
                self._keeper.evicted(self._link, slab)
                how = "every page was copied first" if moved else "read from the backup"
                how = "there is no other copy" if is_only else how
                log.info("slab %d: evicted by donor %s (%s)", slab, self._address, how)
                if place in self._refused:
                    await self._tell(place)
        self._faults.withdraw(generation)

    async def _move(self, slab: int, move_s: float) -> bool:
        """As SlabKeeper.move, but ends with the session: then no donor waits for the answer, but
        the recovery of the session waits for this. The keeper goes on moving the slab."""
        session = self._session.current
        if session is None or not move_s:  # no time, so no wait that could outlast the session
            return await self._keeper.move(self._link, slab, move_s)
        moving = self._keeper.move(self._link, slab, move_s)
        moved = await while_going_on(moving, session.wait_ended())
        if moved is None:
            raise SessionLostError("the session ended", where=f"donor {self._address}")
        return moved

    def activity(self) -> Mapping[int, float]:
        """Page I/O per second by slot."""
        return {place.slot: self._keeper.activity(slab) for slab, place in self.places.items()}

    # ---------------------------------------------------------------------------- drains

    async def _drain(
        self, slab: int, place: Place, wait_s: float, *, is_taken: bool = False
    ) -> bool:
        """Unmaps the slab in the engine and forgets it. Several callers may wait for one drain; it
        returns True to one of them only. `is_taken`: the donor takes only copies by force.

        Raises:
            TimeoutError: requests are still in flight there.
        """
        remote = self._connections.remote
        assert remote is not None, "a slab that is mapped has a remote"
        try:
            pages = 0
            if not self._connections.config.has_backup:
                pages = self._engine.slab_pages_at(slab, remote, place.generation)[0]
            self._engine.slab_unmap(slab, remote, place.generation)
            if pages and not self._connections.is_closing:
                why = "with donors that are gone"
                if is_taken:
                    why = f"to donor {self._address}, which took back slabs with the only copies"
                self._keeper.pages_lost(pages, why)
        except EngineError:
            pass  # another caller drains it, or it is drained
        # A slab without requests in flight is drained at once.
        if not self._engine.slab(slab).is_at(remote, place.generation):
            return self._forget(slab, place)
        # The event comes by the loop, so not before this. If the future were made earlier, nothing
        # would end it for a slab that is already drained.
        drained = self._keeper.drained(slab, remote, place.generation)
        # Not asyncio.timeout, which would cancel the future for all callers.
        done, _ = await asyncio.wait({drained}, timeout=wait_s)
        if not done:
            # The drain goes on, and at its end the slab is no longer here.
            then = self._connections.lease
            drained.add_done_callback(lambda _: self._drained_late(slab, place, then))
            raise TimeoutError(f"slab {slab} has requests in flight")
        return self._forget(slab, place)

    def _drained_late(self, slab: int, place: Place, then: HeldLease | None) -> None:
        """No task waited for the end of the drain: tells the donor, unless the lease has ended."""
        now = self._connections.lease
        if self._forget(slab, place) and then is not None and now is not None and then.is_same(now):
            task = asyncio.create_task(self._tell_quietly(place))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def _forget(self, slab: int, place: Place) -> bool:
        if self.places.get(slab) != place:
            return False
        del self.places[slab]
        return True

    def _in(self, slot: int, generation: int) -> list[tuple[int, Place]]:
        return [item for item in self.places.items() if item[1] == Place(slot, generation)]

    async def _tell(self, place: Place) -> None:
        """Tells the donor that nothing is in flight there. Without a session, or when the donor is
        too busy to hear it, the next renewal of the lease tells it.

        Raises:
            SessionLostError, DeadlineError: the donor did not answer.
        """
        session, lease = self._session.current, self._connections.lease
        if session is None or session.ended is not None or lease is None:
            return
        try:
            await session.unmap(lease.lease, place.slot, place.generation)
        except RequestRefusedError as error:
            if error.reason == m.REFUSED_BUSY:
                session.end()
            # Any other refusal means that the donor has taken the slab already.

    async def _tell_quietly(self, place: Place) -> None:
        with contextlib.suppress(InfiniswapError):
            await self._tell(place)
