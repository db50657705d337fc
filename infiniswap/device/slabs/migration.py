# SPDX-License-Identifier: Apache-2.0
"""Slabs that go from one donor to another: placed there, pulled page by page, then given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.counts import SlabCounts
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.device.slabs.placer import Placer, Purpose
from infiniswap.device.slabs.tasks import Tasks
from infiniswap.engine.protocol import Engine, SlabInfo, SlabState
from infiniswap.errors import EngineError, InfiniswapError

log = logging.getLogger(__name__)

_TICK_S_PULL = 0.01  # the engine continues a pull alone; this resumes one that found no buffer
_PULL_RETRY_S = 1.0
_ALONE_S_MIN = 1.0  # a donor that has waited for a move takes the slab off within that
_PULLS_FUTILE_MAX = 100  # a second's worth
_PLACE_S_MAX = 2.5  # a donor without room is not asked again for two seconds


@dataclass(slots=True)
class Move:
    """A slab on its way from one donor to another."""

    link: DonorLink
    task: asyncio.Task[None] | None = None
    waiting: int = 0
    is_over: bool = False
    """Out of time."""
    is_whole: bool = False


class Migration:
    """The moves of a device's slabs; a part of the mapper. Everything runs on the event loop.

    Args:
        engine: copies the pages.
        known_donors: the donors.
        placer: finds the donor that a slab goes to.
        tasks: of the mapper.
        counts: of the device.
        take_off: takes a slab off a donor, for a reason.
        slab_pages: pages of a slab.
    """

    def __init__(
        self,
        engine: Engine,
        known_donors: KnownDonors,
        placer: Placer,
        tasks: Tasks,
        counts: SlabCounts,
        take_off: Callable[[DonorLink, int, str], Awaitable[None]],
        slab_pages: int,
    ) -> None:
        self._engine = engine
        self._known_donors = known_donors
        self._placer = placer
        self._tasks = tasks
        self._counts = counts
        self._take_off = take_off
        self._slab_pages = slab_pages
        self._moves: dict[int, Move] = {}  # by slab
        self._alone_s: dict[int, float] = {}  # at two donors, and no task moves it: since when
        self._is_pulling = False  # the engine pulls one slab at a time

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        """Copies a slab from a donor that wants it back to another one; waits `wait_s` at most.

        With a backup a move that has run out of time ends there. Without one it goes on until
        every page is copied, and then gives the slab back.

        Returns:
            Whether every page is there.
        """
        move = self._moves.get(slab)
        if move is None:
            if not wait_s and link.config.has_backup:
                return False
            self._known_donors.backoff.full(link, asyncio.get_running_loop().time())
            move = self._begin(link, slab)
        if move.link is not link or move.task is None:
            return False  # it has not even come from elsewhere
        move.waiting += 1
        try:
            await asyncio.wait({move.task}, timeout=wait_s)
        finally:
            move.waiting -= 1
        # Not cancelled: the donor that it goes to must be told of what becomes of it.
        move.is_over = link.config.has_backup
        return move.is_whole

    def finish(self, slabs: Sequence[SlabInfo]) -> None:
        """A donor whose session ended while it waited no longer takes its slab back."""
        now_s = asyncio.get_running_loop().time()
        for number, slab in enumerate(slabs):
            if slab.source_state is not SlabState.MAPPED or number in self._moves:
                self._alone_s.pop(number, None)
            elif now_s - self._alone_s.setdefault(number, now_s) > _ALONE_S_MIN:
                link = self._known_donors.at(slab.source_remote, number)
                if link is not None and link.is_usable:
                    self._begin(link, number)

    def _begin(self, link: DonorLink, slab: int) -> Move:
        move = self._moves[slab] = Move(link)
        move.task = self._tasks.spawn(self._run_move(move, slab), f"move slab {slab}")
        return move

    async def _run_move(self, move: Move, slab: int) -> None:
        try:
            info = self._engine.slab(slab)
            is_here = info.remote == move.link.remote
            if is_here and (info.is_migrating or not await self._place_move(move, slab)):
                return
            # Its slab may have been taken meanwhile and found another donor, which is now left.
            source = self._known_donors.at(self._engine.slab(slab).source_remote, slab)
            if source is None:
                return
            is_whole = await self._pull(source, slab, move)
            while not source.config.has_backup and not is_whole and self._is_source(source, slab):
                await asyncio.sleep(_PULL_RETRY_S)
                is_whole = await self._pull(source, slab, move)
            self._counts.moved += is_whole
            if source is move.link:
                move.is_whole = is_whole
                is_done = is_whole and not move.waiting
            else:
                is_done = is_whole or source.config.has_backup
            if is_done:
                await self._take_off(source, slab, "moved")
        except InfiniswapError as error:
            log.warning("slab %d: cannot be moved: %s", slab, error)
        finally:
            del self._moves[slab]

    async def _place_move(self, move: Move, slab: int) -> bool:
        """As place(), but waits for donors that may be asked again soon: that is worth a moment,
        because otherwise every page of the slab is read from the disk."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _PLACE_S_MAX
        while True:
            others = [link for link in self._known_donors.usable() if link is not move.link]
            retry_s = self._known_donors.backoff.retry_s(others, loop.time())
            if await self._placer.place(slab, Purpose.MOVE):
                return True
            if retry_s is None or retry_s > end_s or move.is_over:
                return False
            await asyncio.sleep(max(0.0, retry_s - loop.time()) + _TICK_S_PULL)
            if move.is_over or slab not in move.link.mapped:
                return False

    def _is_source(self, source: DonorLink, slab: int) -> bool:
        remote = self._engine.slab(slab).source_remote
        return slab in source.mapped and remote is not None and remote == source.remote

    async def _pull(self, source: DonorLink, slab: int, move: Move) -> bool:
        """In its turn, until nothing is left there, nothing more comes, or the move is over.

        Returns:
            Whether nothing is left.
        """
        while self._is_pulling and not move.is_over and self._is_source(source, slab):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S_PULL)
        if self._is_pulling:
            return False
        self._is_pulling = True
        try:
            return await self._pull_now(source, slab, move)
        finally:
            self._is_pulling = False

    async def _pull_now(self, source: DonorLink, slab: int, move: Move) -> bool:
        again, fewest_pages, futile = True, self._slab_pages + 1, 0
        # What does not come (a page that is not what it was, one that the backup refuses) must not
        # keep other slabs from moving.
        while not move.is_over and futile < _PULLS_FUTILE_MAX and self._is_source(source, slab):
            info = self._engine.slab(slab)
            assert info.source_remote is not None
            try:
                if again:
                    pages, grows = self._engine.slab_pages_at(
                        slab, info.source_remote, info.source_generation
                    )
                    if not pages and not grows:
                        return True
                    futile = 0 if pages < fewest_pages else futile + 1
                    fewest_pages = min(fewest_pages, pages)
                again = not self._engine.slab_pull(slab, info.generation, again)
            except EngineError:
                again = True  # one end is suspended, or the new one was lost: it may come back
            await asyncio.sleep(_TICK_S_PULL)
        return False
