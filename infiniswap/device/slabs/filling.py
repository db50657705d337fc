# SPDX-License-Identifier: Apache-2.0
"""Copies pages from the backup to a slab's donor, as fast as that harms no page-in
(infiniswap.policy.refill, infiniswap.policy.pace)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from infiniswap.device.donors.link import DonorLink
from infiniswap.engine.protocol import Engine
from infiniswap.errors import EngineError
from infiniswap.policy.pace import TURN_S, Pace, waits
from infiniswap.policy.refill import Refill

_TICK_S = 0.01  # the engine takes a bounded number of copies at a time


class Filler:
    """A part of the mapper. Everything runs on the event loop.

    Args:
        engine: copies.
        refill: says what is copied next.
        link_of: who has a slab.
        activity: page I/O per second of a slab.
        slab_pages: pages of a slab.
    """

    def __init__(
        self,
        engine: Engine,
        refill: Refill,
        link_of: Callable[[int], DonorLink | None],
        activity: Callable[[int], float],
        slab_pages: int,
    ) -> None:
        self._engine = engine
        self._refill = refill
        self._link_of = link_of
        self._activity = activity
        self._slab_pages = slab_pages
        self._pace = Pace()
        self._wake = asyncio.Event()

    def begin(self, slab: int) -> None:
        """A slab has a donor, or has it back."""
        self._refill.begin(slab)
        self._wake.set()

    def set_rate(self, pages_per_s: float) -> None:
        """Never more than that from now on; 0: no copies."""
        self._refill.set_rate(pages_per_s)

    async def run(self) -> None:
        """Copies until cancelled."""
        time_s = asyncio.get_running_loop().time
        while True:
            self._wake.clear()
            pause_s = self._refill.due_s() - time_s()
            if pause_s <= 0.0:
                await self._copy_what_is_due()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, 60.0)):
                    await self._wake.wait()

    async def _copy_what_is_due(self) -> None:
        """Turn after turn, as long as there is something to copy."""
        time_s = asyncio.get_running_loop().time
        begun_s, before = time_s(), self._page_ins()
        self._pace.begin()
        while self._refill.due_s() <= time_s():
            rate = self._pace.pages_per_s
            if rate:
                self._refill.step(time_s(), self._activity, self._copy, self._slab_pages, rate)
            await asyncio.sleep(_TICK_S)
            elapsed_s = time_s() - begun_s
            if elapsed_s >= TURN_S:
                after = self._page_ins()
                self._pace.turn(elapsed_s, waits(before[0], after[0], after[1]))
                begun_s, before = time_s(), after

    def _page_ins(self) -> tuple[list[int], list[int]]:
        figures = self._engine.figures()
        return list(figures.latency["read_latency"]), list(figures.latency_bounds_ns)

    def _copy(self, slab: int, first: int, pages_max: int) -> tuple[int, int] | None:
        link = self._link_of(slab)
        if link is None:
            return None
        try:
            return self._engine.slab_fill(slab, link.mapped[slab].generation, first, pages_max)
        except EngineError:
            return None  # suspended or being unmapped; when it is back it is begun again
