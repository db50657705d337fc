# SPDX-License-Identifier: Apache-2.0
"""Sessions with donors that were opened only to ask, or for the next slab to ask (ADR 53).

Opening one takes longer than all else in a search for a donor. A device that grows looks for the
next donor soon: sessions are kept for a moment, and those that it will need are opened meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.device.slabs.tasks import Tasks
from infiniswap.errors import InfiniswapError
from infiniswap.ticks import loop_now_s

_GROWS_S: Final = 5.0
"""For so long after a slab has found its donor the device counts as one that grows."""
_AGAIN_S: Final = 0.1


class AskedDonors:
    """A part of the placer. Everything runs on the event loop.

    Args:
        known_donors: says whether a search is under way; hears who cannot be reached.
        tasks: open sessions, and end them.
    """

    def __init__(self, known_donors: KnownDonors, tasks: Tasks) -> None:
        self._known_donors = known_donors
        self._tasks = tasks
        self._links: set[DonorLink] = set()
        self._opening: dict[DonorLink, asyncio.Task[bool]] = {}
        self._next: Sequence[DonorLink] = ()
        self._grows_until_s = 0.0
        self._letting_go: asyncio.Task[None] | None = None

    @property
    def grows(self) -> bool:
        """Whether another slab will probably look for a donor soon."""
        return loop_now_s() < self._grows_until_s

    def open(self, links: Sequence[DonorLink]) -> None:
        """Opens sessions with the donors that the next slab will ask, without waiting for it."""
        self._next = links
        for link in links:
            self._links.add(link)
            if link not in self._opening:
                name = f"open a session with {link.address}"
                task = self._opening[link] = self._tasks.spawn(self._open(link), name)
                task.add_done_callback(partial(self._opened, link))

    async def _open(self, link: DonorLink) -> bool:
        now_s = loop_now_s()
        try:
            await link.open()
        except InfiniswapError as error:
            self._known_donors.unreachable(link, error, now_s)
            return False
        return True

    def _opened(self, link: DonorLink, _task: asyncio.Task[bool]) -> None:
        del self._opening[link]

    def take_next(self) -> Sequence[DonorLink]:
        """Those for whom sessions were opened, once. None if the sessions have ended since: other
        donors may be there by now."""
        found, self._next = self._next, ()
        return found

    async def may_ask(self, link: DonorLink) -> bool:
        """Waits for a session that is being opened. False: that has failed, and a second attempt
        would take as long again."""
        self._links.add(link)
        task = self._opening.get(link)
        if task is None:
            return True
        await asyncio.wait({task})
        return task.result()

    def search_ended(self, *, found: bool) -> None:
        """Lets go of who was asked in vain; if the search has found a donor, after a while."""
        if found:
            self._grows_until_s = loop_now_s() + _GROWS_S
        # Not waited for: a donor that hangs would hold up whoever has found another one.
        if self._links and (self._letting_go is None or self._letting_go.done()):
            self._letting_go = self._tasks.spawn(self._let_go(), "let go of donors")

    async def _let_go(self) -> None:
        while self._links:
            if self.grows:
                await asyncio.sleep(self._grows_until_s - loop_now_s())
            elif self._known_donors.searches:
                await asyncio.sleep(_AGAIN_S)
            else:
                self._next = ()
                await self._links.pop().let_go()
