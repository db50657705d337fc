# SPDX-License-Identifier: Apache-2.0
"""Which mapped slabs a donor takes back: batch eviction.

The paper, section 4.3: to evict E slabs a donor cannot know how busy each of its slabs is, because
one-sided access passes it by. So it asks the owners of E + E' random ones (E' <= E) and evicts the
E least active of those. That costs a bounded number of messages and, with high probability, spares
the busiest slabs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from infiniswap.config import Config

Slab = TypeVar("Slab", bound=Hashable)

_KEPT_S = 60.0
"""After an owner has kept a slab, it gets no slab above its share for this long."""
_RETRY_S = 1.0
"""Pause after a batch that brought nothing: the next one would find the same."""


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """Bounds of a batch.

    Attributes:
        slabs_max: E at most; the next batch follows.
        extra: E', slabs asked for their activity beyond E; None: as many as E.
        activity_s: how long owners may take to report activity.
        deadline_s: how long a consumer may take to give a slab up.
        move_s: how long before that it may copy the slab to another donor.
        refused_s: how long a slab whose owner holds no other copy is left alone, and after how long
            of an urgent shortage last copies are taken if nothing else is lent.
        last_copy_s: likewise of a shortage that is not urgent.
    """

    slabs_max: int = 16
    extra: int | None = None
    activity_s: float = 0.2
    deadline_s: float = 1.0
    move_s: float = 3.0
    refused_s: float = 10.0
    last_copy_s: float = 30.0


def eviction_config(config: Config) -> EvictionConfig:
    """As it is configured."""
    return EvictionConfig(
        slabs_max=config.policy.evict_slabs_max,
        extra=config.policy.evict_extra_slabs,
        deadline_s=config.daemon.evict_deadline_s,
        move_s=config.daemon.evict_move_s,
    )


def candidates(
    mapped: Iterable[Slab], evict: int, rng: Random, extra: int | None = None
) -> list[Slab]:
    """The E + E' slabs whose owners the donor asks.

    Args:
        mapped: every mapped slab.
        evict: E, how many the donor takes back.
        rng: source of randomness.
        extra: E'; at most E of it is used; None: E.

    Returns:
        Distinct slabs of `mapped`, at most E + E', in random order.
    """
    if evict <= 0:
        return []
    extra = evict if extra is None else max(0, min(extra, evict))
    pool = list(dict.fromkeys(mapped))
    return rng.sample(pool, min(len(pool), evict + extra))


def victims(
    asked: Iterable[Slab], activity: Mapping[Slab, float], evict: int, *, busiest: bool = False
) -> list[Slab]:
    """The slabs to take back, least active first.

    A slab whose owner did not answer goes last: a consumer in trouble is the last one to lose its
    memory, and a dead one loses it anyway when its lease expires.

    Args:
        asked: the result of `candidates`; its random order breaks ties.
        activity: page I/O per second by slab, as far as the owners answered.
        evict: E.
        busiest: the most active first instead.

    Returns:
        At most E of `asked`; fewer only when fewer were asked.
    """
    unknown = 0.0 if busiest else float("inf")
    ranked = sorted(
        dict.fromkeys(asked), key=lambda slab: activity.get(slab, unknown), reverse=busiest
    )
    return ranked[: max(0, evict)]


@dataclass(frozen=True, slots=True)
class Asked(Generic[Slab]):
    """The first half of a batch.

    Attributes:
        count: E, what is left of it after its bounds.
        hurried: slabs that are being moved for another batch and are taken now.
        asked: slabs whose owners are asked for their activity.
        busiest: the most active ones are taken.
    """

    count: int
    hurried: list[Slab]
    asked: list[Slab]
    busiest: bool = False


class BatchChoice(Generic[Slab]):
    """Chooses the slabs of a donor's batches, several of which may overlap. No I/O, no clock.

    Args:
        config: bounds; another one may take its place.
        rng: source of randomness.
    """

    def __init__(self, config: EvictionConfig, rng: Random) -> None:
        self.config = config
        self._rng = rng
        self._refused_s: dict[Slab, float] = {}  # when its owner kept it last
        self._moving: set[Slab] = set()

    def ask(
        self,
        mapped: Collection[Slab],
        count: int,
        now_s: float,
        among: Iterable[Slab] | None = None,
        *,
        in_hurry: bool,
        busiest: bool = False,
        kept_since_s: float | None = None,
    ) -> Asked[Slab]:
        """Whose activity decides.

        Args:
            mapped: every mapped slab.
            count: E.
            now_s: seconds of the clock used throughout.
            among: the only ones that may be taken; None: all.
            in_hurry: their consumers get no time to copy them elsewhere. So slabs that are being
                copied for another batch go first: their time is over.
            busiest: the most active of all are to be taken, not the least active of a few.
            kept_since_s: those that their owners have kept since then are to be taken, if nothing
                else is lent; None: never.
        """
        self._refused_s = {k: self._refused_s[k] for k in mapped if k in self._refused_s}
        allowed = set(mapped if among is None else among)
        if kept_since_s is None:
            allowed -= {k for k, s in self._refused_s.items() if now_s - s < self.config.refused_s}
        elif any(self._refused_s.get(slab, -math.inf) < kept_since_s for slab in allowed):
            allowed = set()
        count = min(count, self.config.slabs_max)
        hurried = [slab for slab in mapped if slab in self._moving & allowed] if in_hurry else []
        del hurried[count:]
        allowed -= self._moving
        free = [slab for slab in mapped if slab in allowed]
        left = count - len(hurried)
        asked = free if busiest else candidates(free, left, self._rng, self.config.extra)
        return Asked(count, hurried, asked, busiest)

    def take(
        self, batch: Asked[Slab], activity: Mapping[Slab, float], *, in_hurry: bool
    ) -> list[Slab]:
        """The slabs to take back beside the hurried ones; see `victims`. One that another batch has
        taken meanwhile is left out."""
        asked = [slab for slab in batch.asked if slab not in self._moving]
        left = batch.count - len(batch.hurried)
        chosen = victims(asked, activity, left, busiest=batch.busiest)
        if not in_hurry:
            self._moving.update(chosen)
        return chosen

    def moved(self, slab: Slab) -> None:
        """A slab that was not in a hurry has been given up, or its owner keeps it."""
        self._moving.discard(slab)

    def refused(self, slab: Slab, now_s: float) -> None:
        """Its owner holds no other copy and keeps it."""
        self._refused_s[slab] = now_s

    def is_kept(self, slab: Slab, now_s: float) -> bool:
        """Whether its owner has kept it lately."""
        return now_s - self._refused_s.get(slab, -math.inf) < _KEPT_S


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Slabs that are being evicted."""

    urgent: bool
    count: int


class Batches:
    """Which batch of evictions may begin now. No I/O, no clock."""

    def __init__(self) -> None:
        self._running: list[Batch] = []
        self._after_s = {False: float("-inf"), True: float("-inf")}

    def begin(self, count: int, urgent: bool, now_s: float) -> Batch | None:
        """The batch to begin so that `count` slabs come back; None: none now.

        A batch in a hurry does not wait for those that have time, but hurries them.
        """
        hurries = any(batch.urgent for batch in self._running)
        if not urgent:
            count -= sum(batch.count for batch in self._running)
        if hurries or count <= 0 or now_s < self._after_s[urgent]:
            return None
        batch = Batch(urgent, count)
        self._running.append(batch)
        return batch

    def end(self, batch: Batch, brought: int, now_s: float) -> None:
        """A batch has ended and brought so many slabs."""
        self._running.remove(batch)
        if not brought:
            self._after_s[batch.urgent] = now_s + _RETRY_S
