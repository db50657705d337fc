# SPDX-License-Identifier: Apache-2.0
"""What one consumer may keep of a donor's pool when another one needs memory.

A consumer may take more than its share as long as no other one asks: idle memory helps nobody. When
a consumer below its share asks and nothing is left, slabs of consumers above their share are taken
back for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Consumer = TypeVar("Consumer", bound=Hashable)


def fair_slabs(slabs_max: int, consumers: int, share_max: float) -> int:
    """Slabs that every consumer may count on; at least one.

    Args:
        slabs_max: size of the whole pool.
        consumers: how many hold slabs here, or ask for one.
        share_max: share of the pool that one consumer may keep at most while others need memory.
    """
    share = min(share_max, 1.0 / max(1, consumers))
    return max(1, int(slabs_max * share))


def over_quota(
    held: Mapping[Consumer, int], asking: Consumer, slabs_max: int, share_max: float
) -> dict[Consumer, int]:
    """Who has to give slabs back so that `asking` gets one, and how many at most.

    Args:
        held: slabs by consumer.
        asking: a consumer that wants one slab more.
        slabs_max: of the whole pool.
        share_max: see fair_slabs.

    Returns:
        Slabs above the fair share by consumer; empty when `asking` has its share already.
    """
    holders = {consumer for consumer, slabs in held.items() if slabs > 0}
    fair = fair_slabs(slabs_max, len(holders | {asking}), share_max)
    if held.get(asking, 0) >= fair:
        return {}
    over = {consumer: slabs - fair for consumer, slabs in held.items() if slabs > fair}
    # One slab above the share is no reason if taking it would only swap the two consumers.
    return {c: n for c, n in over.items() if c != asking and held[c] - held.get(asking, 0) > 1}
