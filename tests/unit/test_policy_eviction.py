# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.eviction."""

from __future__ import annotations

from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from infiniswap.policy.eviction import candidates, victims

SLABS = st.sets(st.integers(0, 50))


@given(SLABS, st.integers(-1, 60), st.none() | st.integers(-1, 60), st.integers())
def test_candidates_are_e_plus_at_most_e_mapped_slabs(
    mapped: set[int], evict: int, extra: int | None, seed: int
) -> None:
    asked = candidates(sorted(mapped), evict, Random(seed), extra)
    assert set(asked) <= mapped
    assert len(asked) == len(set(asked))
    bound = max(0, evict) + (max(0, evict) if extra is None else max(0, min(extra, evict)))
    assert len(asked) == min(len(mapped), bound if evict > 0 else 0)


@given(SLABS, st.dictionaries(st.integers(0, 50), st.floats(0, 1e9)), st.integers(-1, 60))
@example({1, 2, 3}, {2: 100.0, 3: 5.0}, 3)  # whose owner is silent goes last
def test_victims_are_the_least_active_of_those_asked_and_the_silent_last(
    asked: set[int], activity: dict[int, float], evict: int
) -> None:
    def rank(slab: int) -> float:
        return activity.get(slab, float("inf"))

    chosen = victims(sorted(asked), activity, evict)
    assert len(chosen) == len(set(chosen)) == min(len(asked), max(0, evict))
    assert set(chosen) <= asked
    assert list(map(rank, chosen)) == sorted(map(rank, asked))[: len(chosen)]
