# SPDX-License-Identifier: Apache-2.0
"""Which mapped slabs a donor takes back: batch eviction.

The paper, section 4.3: to evict E slabs a donor cannot know how busy each of its slabs is, because
one-sided access passes it by. So it asks the owners of E + E' random ones (E' <= E) and evicts the
E least active of those. That costs a bounded number of messages and, with high probability, spares
the busiest slabs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from random import Random
from typing import TypeVar

Slab = TypeVar("Slab", bound=Hashable)


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


def victims(asked: Iterable[Slab], activity: Mapping[Slab, float], evict: int) -> list[Slab]:
    """The slabs to take back, least active first.

    A slab whose owner did not answer counts as the busiest: a consumer in trouble is the last one
    to lose its memory, and a dead one loses it anyway when its lease expires.

    Args:
        asked: the result of `candidates`; its random order breaks ties.
        activity: page I/O per second by slab, as far as the owners answered.
        evict: E.

    Returns:
        At most E of `asked`; fewer only when fewer were asked.
    """
    ranked = sorted(dict.fromkeys(asked), key=lambda slab: activity.get(slab, float("inf")))
    return ranked[: max(0, evict)]
