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
slab, because no hurry justifies losing data.

A batch in a hurry first takes slabs that are being copied for another batch: their owners are asked
once more, and stop copying.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeAlias

from infiniswap import events
from infiniswap.config import Config
from infiniswap.errors import InfiniswapError
from infiniswap.policy.eviction import candidates, victims

log = logging.getLogger(__name__)

MappedSlab: TypeAlias = tuple[int, int]
"""Lease and slot."""


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """Bounds of a batch.

    Attributes:
        slabs_max: E at most; the next batch follows.
        extra: E', slabs asked for their activity beyond E; None: as many as E.
        activity_s: how long owners may take to report activity.
        deadline_s: how long a consumer may take to give a slab up.
        move_s: how long before that it may copy the slab to another donor.
        refused_s: how long a slab whose owner holds no other copy is left alone.
    """

    slabs_max: int = 16
    extra: int | None = None
    activity_s: float = 0.2
    deadline_s: float = 1.0
    move_s: float = 3.0
    refused_s: float = 10.0


def eviction_config(config: Config) -> EvictionConfig:
    """As it is configured."""
    return EvictionConfig(
        slabs_max=config.policy.evict_slabs_max,
        extra=config.policy.evict_extra_slabs,
        deadline_s=config.daemon.evict_deadline_s,
        move_s=config.daemon.evict_move_s,
    )


class SlabOwners(Protocol):
    """The devices that hold slabs, as the evictor asks them (infiniswap.donor.lent)."""

    def mapped(self) -> list[MappedSlab]:
        """Every slab that is lent."""

    async def activity(self, lease: int, wait_s: float) -> dict[int, float]:
        """Page I/O per second by slot. Raises InfiniswapError: the owner did not say."""

    async def evict(self, lease: int, slot: int, deadline_ms: int, move_ms: int = 0) -> bool:
        """False: its owner keeps it. Raises EngineError."""


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
        self.config = config
        self._rng = rng
        self._clock = clock
        self._counters = counters
        self._refused_until_s: dict[MappedSlab, float] = {}
        self._moving: set[MappedSlab] = set()

    async def evict(
        self,
        count: int,
        among: Iterable[MappedSlab] | None = None,
        *,
        move_s: float = 0.0,
    ) -> int:
        """Takes slabs back, the least active of a random choice.

        Args:
            count: E, at most `slabs_max` at once.
            among: the only ones that may be taken; None: all.
            move_s: how long a consumer may copy its slab to another donor first; 0: the donor is
                in a hurry.

        Returns:
            How many came back.
        """
        now_s = self._clock()
        self._refused_until_s = {k: s for k, s in self._refused_until_s.items() if s > now_s}
        mapped = self._owners.mapped()
        allowed = set(mapped if among is None else among) - set(self._refused_until_s)
        count = min(count, self.config.slabs_max)
        # Chosen before, and not given up yet: their time to be copied is over.
        hurried = [] if move_s else [slab for slab in mapped if slab in self._moving & allowed]
        del hurried[count:]
        allowed -= self._moving
        asked = candidates(
            [slab for slab in mapped if slab in allowed],
            count - len(hurried),
            self._rng,
            self.config.extra,
        )
        if not asked and not hurried:
            return 0
        self._counters["eviction_batches"] += 1
        activity = await self._activity(asked)
        asked = [slab for slab in asked if slab not in self._moving]  # by another batch, meanwhile
        chosen = victims(asked, activity, count - len(hurried))
        if move_s:
            self._moving.update(chosen)
        done = await asyncio.gather(*(self._take(slab, move_s) for slab in hurried + chosen))
        log.info(
            "evicted %d of %d slabs, of %d asked for",
            sum(done),
            len(hurried) + len(chosen),
            len(hurried) + len(asked),
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

    async def _take(self, slab: MappedSlab, move_s: float) -> bool:
        lease, slot = slab
        try:
            taken = await self._owners.evict(
                lease, slot, round(self.config.deadline_s * 1000), round(move_s * 1000)
            )
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
                self._moving.discard(slab)
        if not taken:
            self._refused_until_s[slab] = self._clock() + self.config.refused_s
        return taken
