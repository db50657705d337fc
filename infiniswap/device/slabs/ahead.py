# SPDX-License-Identifier: Apache-2.0
"""Maps slabs ahead of the page-out front: for devices that `run` makes (infiniswap.policy.ahead).

A slab that was mapped so is untouched until the kernel writes to it. While it is, losing it costs
nothing: it is not moved, not counted as evicted and not worth another donor. Its first page ends
that, and its donor is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import accumulate

from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.device.slabs.placer import Placer, Purpose
from infiniswap.device.slabs.tasks import Tasks
from infiniswap.engine.protocol import Engine, SlabInfo, SlabState
from infiniswap.errors import InfiniswapError
from infiniswap.policy.ahead import Binding, MapAhead

log = logging.getLogger(__name__)


class AheadMapper:
    """A part of the mapper. Everything runs on the event loop.

    Args:
        engine: counts what is written.
        known_donors: the donors.
        placer: finds one of them for a slab.
        tasks: of the mapper.
        policies: say which slabs are next, each of a range of the device, in their order.
    """

    def __init__(
        self,
        engine: Engine,
        known_donors: KnownDonors,
        placer: Placer,
        tasks: Tasks,
        policies: Sequence[MapAhead],
    ) -> None:
        self._engine = engine
        self._known_donors = known_donors
        self._placer = placer
        self._tasks = tasks
        firsts = accumulate((policy.slab_count for policy in policies), initial=0)
        self._policies = {
            range(first, first + policy.slab_count): policy
            for first, policy in zip(firsts, policies, strict=False)
        }
        self._outs: dict[int, int] = {}  # of untouched slabs: pages paged out before
        self._used: set[int] = set()  # whose donor has yet to be told
        self._mapping: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def is_untouched(self, slab: int) -> bool:
        """Whether it was mapped ahead, and nothing has been written to it since."""
        outs = self._outs.get(slab)
        return outs is not None and self._engine.slab(slab).page_outs == outs

    def went_back(self, slab: int) -> bool:
        """A slab has no donor any longer. True: it was untouched."""
        was_untouched = self.is_untouched(slab)
        self._outs.pop(slab, None)
        if was_untouched:
            self._policy_of(slab).went_back()
        return was_untouched

    def _policy_of(self, slab: int) -> MapAhead:
        return next(policy for slabs, policy in self._policies.items() if slab in slabs)

    def look(self, now_s: float, slabs: Sequence[SlabInfo]) -> None:
        """Begins the work that is due now, without waiting."""
        for slab, outs in list(self._outs.items()):
            # Newer than `slabs`. One that is unmapped by now stays until `went_back` is told.
            if self._engine.slab(slab).page_outs != outs:
                del self._outs[slab]
                self._used.add(slab)
        if self._used and (self._telling is None or self._telling.done()):
            self._telling = self._tasks.spawn(self._tell(), "slabs mapped ahead are in use")
        totals, bindings = [slab.page_outs for slab in slabs], self._bindings(slabs)
        wanted = [
            part.start + slab
            for part, policy in self._policies.items()
            for slab in policy.next(
                now_s, totals[part.start : part.stop], bindings[part.start : part.stop]
            )
        ]
        if wanted and (self._mapping is None or self._mapping.done()):
            outs_before = {slab: slabs[slab].page_outs for slab in wanted}
            self._mapping = self._tasks.spawn(self._map(outs_before), "map slabs ahead")

    def _bindings(self, slabs: Sequence[SlabInfo]) -> list[Binding]:
        def binding(number: int, slab: SlabInfo) -> Binding:
            if slab.state is SlabState.UNMAPPED:
                return Binding.UNMAPPED
            return Binding.EMPTY if number in self._outs else Binding.OTHER

        return [binding(number, slab) for number, slab in enumerate(slabs)]

    async def _map(self, outs: dict[int, int]) -> None:
        for slab, pages in outs.items():
            if self._engine.slab(slab).state is not SlabState.UNMAPPED:
                continue  # it became hot meanwhile
            if not await self._placer.place(slab, Purpose.AHEAD):
                for policy in self._policies.values():
                    policy.refused(asyncio.get_running_loop().time())
                return
            self._policy_of(slab).mapped()
            self._outs[slab] = pages

    async def _tell(self) -> None:
        for slab in sorted(self._used):
            link = self._known_donors.of(slab)
            if link is None or await self._keep(link, slab):
                self._used.discard(slab)

    async def _keep(self, link: DonorLink, slab: int) -> bool:
        try:
            return await link.keep(slab)
        except InfiniswapError as error:
            log.debug("slab %d: donor %s was not told of its use: %s", slab, link.address, error)
            return False
