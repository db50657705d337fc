# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.eviction."""

from __future__ import annotations

from random import Random

from hypothesis import given
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
def test_victims_are_the_least_active_of_those_asked(
    asked: set[int], activity: dict[int, float], evict: int
) -> None:
    chosen = victims(sorted(asked), activity, evict)
    assert set(chosen) <= asked
    assert len(chosen) == min(len(asked), max(0, evict))
    spared = asked - set(chosen)
    for slab in chosen:
        for other in spared:
            assert activity.get(slab, float("inf")) <= activity.get(other, float("inf"))


def test_a_slab_whose_owner_is_silent_goes_last() -> None:
    assert victims([1, 2, 3], {2: 100.0, 3: 5.0}, 2) == [3, 2]
    assert victims([1, 2, 3], {2: 100.0, 3: 5.0}, 3) == [3, 2, 1]
    assert victims([1], {}, 1) == [1]


def test_the_busiest_slab_is_usually_spared() -> None:
    rng = Random(3)
    mapped = list(range(32))
    activity = {slab: float(slab) for slab in mapped}
    hit = sum(31 in victims(candidates(mapped, 2, rng), activity, 2) for _ in range(500))
    assert hit == 0
