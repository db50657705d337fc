# SPDX-License-Identifier: Apache-2.0
"""Batch eviction: takes mapped slabs back from their consumers.

    donor                                   consumers
    activity? (owners of E + E' slabs)  ->
                                        <-  page I/O per second by slot
    EVICT (the E least active)          ->
                                            without hurry: copies it to another donor
                                            no new request, those under way end
                                        <-  DONE
    fence, wait for references, release

Each step is bounded. A consumer that does not say how active its slabs are counts as the busiest. A
consumer that does not answer EVICT in time loses the slab nevertheless: it is fenced, later
requests fail, and the consumer reads its backup. A consumer that holds the only copy keeps the
slab as long as anything else can be taken. It loses the slab when an operator says so (`drain
--force`), or when the host's headroom stays broken although nothing else is lent: what the
consumer says of its copies cannot be checked, and must not hold the host's memory for ever.

A batch in a hurry first takes slabs that are being copied for another batch: their owners are asked
once more, and stop copying.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol, TypeAlias

from infiniswap import events
from infiniswap.errors import InfiniswapError
from infiniswap.policy.eviction import BatchChoice, EvictionConfig
from infiniswap.units import counted

log = logging.getLogger(__name__)

MappedSlab: TypeAlias = tuple[int, int]
"""Lease and slot."""


class SlabOwners(Protocol):
    """The devices that hold slabs, as the evictor asks them (infiniswap.donor.lent)."""

    def mapped(self) -> list[MappedSlab]:
        """Every slab that is lent."""

    async def activity(self, lease: int, wait_s: float) -> dict[int, float]:
        """Page I/O per second by slot. Raises InfiniswapError: the owner did not say."""

    async def evict(
        self, lease: int, slot: int, deadline_ms: int, move_ms: int = 0, *, last_copy: bool = False
    ) -> bool:
        """Asks the owner for a slab; False if it keeps the slab, which `last_copy` rules out.

        Raises:
            EngineError: the store cannot take it back.
        """


class Evictor:
    """Chooses slabs and takes them back.

    Args:
        owners: of the slabs.
        config: bounds.
        rng: source of randomness.
        clock: seconds, monotonic.
        counters: where `eviction_batches` and so on are counted.
    """

    def __init__(
        self,
        owners: SlabOwners,
        config: EvictionConfig,
        rng: Random,
        clock: Callable[[], float],
        counters: Counter[str],
    ) -> None:
        self._owners = owners
        self._choice: BatchChoice[MappedSlab] = BatchChoice(config, rng)
        self._clock = clock
        self._counters = counters

    @property
    def config(self) -> EvictionConfig:
        """Bounds in force."""
        return self._choice.config

    @config.setter
    def config(self, config: EvictionConfig) -> None:
        self._choice.config = config

    async def evict(
        self,
        count: int,
        among: Iterable[MappedSlab] | None = None,
        *,
        move_s: float = 0.0,
        busiest: bool = False,
        kept_since_s: float | None = None,
    ) -> int:
        """Takes slabs back, the least active of a random choice.

        Args:
            count: E, at most `slabs_max` at once.
            among: the only ones that may be taken; None: all.
            move_s: how long a consumer may copy its slab to another donor first; 0: the donor is
                in a hurry.
            busiest: takes the most active of all instead.
            kept_since_s: takes those that their owners have kept since then, whatever they say;
                none while anything else is lent. None: never.

        Returns:
            How many came back.
        """
        in_hurry = not move_s
        batch = self._choice.ask(
            *(self._owners.mapped(), count, self._clock(), among),
            in_hurry=in_hurry,
            busiest=busiest,
            kept_since_s=kept_since_s,
        )
        if not batch.asked and not batch.hurried:
            return 0
        self._counters["eviction_batches"] += 1
        activity = await self._activity(batch.asked)
        last_copy = kept_since_s is not None
        taken = batch.hurried + self._choice.take(batch, activity, in_hurry=in_hurry)
        done = await asyncio.gather(*(self._take(slab, move_s, last_copy) for slab in taken))
        log.info(
            "evicted %d of %s, of %d asked for",
            sum(done),
            counted(len(taken), "slab"),
            len(batch.hurried) + len(batch.asked),
        )
        return sum(done)

    async def _activity(self, asked: list[MappedSlab]) -> dict[MappedSlab, float]:
        if len(asked) <= 1:
            return {}  # nothing to choose from
        leases = sorted({lease for lease, _ in asked})
        answers = await asyncio.gather(*(self._ask(lease) for lease in leases))
        return {
            (lease, slot): rate
            for lease, answer in zip(leases, answers, strict=True)
            for slot, rate in answer.items()
        }

    async def _ask(self, lease: int) -> dict[int, float]:
        try:
            return await self._owners.activity(lease, self.config.activity_s)
        except InfiniswapError as error:
            self._counters["activity_unanswered"] += 1
            log.debug("lease %d does not say how active it is: %s", lease, error)
            return {}

    def is_kept(self, slab: MappedSlab) -> bool:
        """Whether its owner has kept a slab lately that was asked back."""
        return self._choice.is_kept(slab, self._clock())

    async def _take(self, slab: MappedSlab, move_s: float, last_copy: bool) -> bool:
        lease, slot = slab
        deadline_ms, move_ms = round(self.config.deadline_s * 1000), round(move_s * 1000)
        try:
            taken = await self._owners.evict(lease, slot, deadline_ms, move_ms, last_copy=last_copy)
        except InfiniswapError as error:
            log.error(
                "slot %d of lease %d cannot be taken back: %s",
                slot,
                lease,
                error,
                extra=events.about(events.SLAB_KEPT),
            )
            return False
        finally:
            if move_s:
                self._choice.moved(slab)
        if not taken:
            self._choice.refused(slab, self._clock())
        return taken
