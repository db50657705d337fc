# SPDX-License-Identifier: Apache-2.0
"""The way back to a donor: to the address at which it was, or to where its name leads.

The address is tried first, because the resolver may be swapped out to the very device that waits
for its donor. The address may be dead, or belong to another host by now, so the name is tried a
moment later, as RFC 8305 does with several addresses. A way that fails is tried again while the
other one is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from infiniswap.control.channel import Ended
from infiniswap.control.client import Session, SessionHandler
from infiniswap.control.messages import DeviceFigures
from infiniswap.device.donors.lease import HeldLease
from infiniswap.device.off_loop import to_end

_HEAD_START_S: Final = 0.25
_AGAIN_FOR_S: Final = 3.0
"""The name is not tried again after this time, so that two ways that fail in turn end."""


async def reach(
    dial: Callable[..., Awaitable[Session]],
    handler: SessionHandler,
    host: str,
    lease: HeldLease | None,
) -> Session:
    """Opens a session with the donor of that lease; for None, with any donor at that host.

    Args:
        dial: opens a session for a handler; with `peer` at that address, otherwise where the name
            of the donor leads.
        handler: hears of the session that is returned, and of no other one. It hears first whether
            that donor is draining.
        host: the donor's name, or its address in figures.
        lease: will be reclaimed.

    Returns:
        A session with a donor of another incarnation only if the name leads there.

    Raises:
        InfiniswapError: neither way leads to one. The error is that of the name.
    """
    if lease is None or lease.peer in ("", host):
        session = await dial(handler)
        handler.draining(session.welcome.draining)
        return session
    by_address, by_name = ways = _Way(dial, handler, lease.peer), _Way(dial, handler, "")
    try:
        found = await _first(by_address, by_name, lease.incarnation)
        await _close(way for way in ways if way is not found)
    except BaseException:
        await _close(ways)
        raise
    return found.take()


async def _first(by_address: _Way, by_name: _Way, incarnation: str) -> _Way:
    """The way that leads to the donor; the one by name if neither does."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _AGAIN_FOR_S
    by_address.begin()
    await _wait(by_address)
    if not by_address.leads_to(incarnation):
        by_name.begin()
    while True:
        for way in (by_address, by_name):
            if way.leads_to(incarnation):
                return way
        under_way = [way for way in (by_address, by_name) if not way.is_done]
        if not under_way:
            return by_name
        await _wait(*under_way)
        if by_address.is_done == by_name.is_done:
            continue
        done = by_address if by_address.is_done else by_name
        # The host that answers by that name has been asked.
        is_final = done is by_name and (done.has_answered or loop.time() >= end_s)
        if not is_final and not done.leads_to(incarnation) and loop.time() >= done.again_s:
            await _close([done])
            done.begin()


async def _wait(*ways: _Way) -> None:
    """Waits until one of them is done, or a moment has passed."""
    tasks = {way.task for way in ways if way.task is not None}
    await asyncio.wait(tasks, timeout=_HEAD_START_S, return_when=asyncio.FIRST_COMPLETED)


async def _close(ways: Iterable[_Way]) -> None:
    """Ends them. A caller that is cancelled waits for their end first."""
    await to_end(asyncio.gather(*(way.close() for way in ways)))


class _Way:
    """One way: a SessionHandler that passes messages on once its session has been taken."""

    def __init__(
        self, dial: Callable[..., Awaitable[Session]], handler: SessionHandler, peer: str
    ) -> None:
        self._dial = dial
        self._handler = handler
        self._peer = peer
        self.task: asyncio.Task[Session] | None = None
        self.again_s = 0.0
        self._is_taken = False
        self._draining: bool | None = None  # as the donor said since its welcome

    def begin(self) -> None:
        """Dials."""
        loop = asyncio.get_running_loop()
        self.again_s = loop.time() + _HEAD_START_S
        self._draining = None
        self.task = loop.create_task(self._open(), name=f"way to {self._peer or 'a name'}")

    async def _open(self) -> Session:
        return await self._dial(self, peer=self._peer)

    @property
    def is_done(self) -> bool:
        """Whether the attempt has succeeded or failed."""
        return self.task is not None and self.task.done()

    @property
    def has_answered(self) -> bool:
        """Whether some donor has answered, and its session has not ended."""
        task = self.task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return False
        return task.result().ended is None

    def leads_to(self, incarnation: str) -> bool:
        """Whether that donor has answered."""
        if not self.has_answered:
            return False
        assert self.task is not None
        return self.task.result().welcome.incarnation == incarnation

    def take(self) -> Session:
        """The session.

        Raises:
            InfiniswapError: why there is none.
        """
        assert self.task is not None
        session = self.task.result()
        self._is_taken = True
        draining = session.welcome.draining if self._draining is None else self._draining
        self._handler.draining(draining)
        return session

    async def close(self) -> None:
        """Ends the attempt, or the session if it has not been taken."""
        task, self.task = self.task, None
        if task is None or self._is_taken:
            return
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            await task.result().close()

    # ------------------------------------------------------------- see SessionHandler

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        """See SessionHandler."""
        await self._handler.evict(lease, slot, generation, deadline_s, move_s, last_copy=last_copy)

    async def activity(self, lease: int) -> Mapping[int, float]:
        """See SessionHandler."""
        return await self._handler.activity(lease)

    def figures(self) -> DeviceFigures | None:
        """See SessionHandler."""
        return self._handler.figures()

    def draining(self, draining: bool) -> None:
        """See SessionHandler."""
        self._draining = draining
        if self._is_taken:
            self._handler.draining(draining)

    def ended(self, ended: Ended) -> None:
        """See SessionHandler."""
        if self._is_taken:
            self._handler.ended(ended)
