# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.eviction."""

from __future__ import annotations

from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from infiniswap.policy.eviction import (
    BatchChoice,
    Batches,
    EvictionConfig,
    candidates,
    victims,
)

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


def test_batches_overlap_only_where_one_is_in_a_hurry() -> None:
    batches = Batches()
    gentle = batches.begin(4, False, 0.0)
    assert gentle is not None
    assert batches.begin(4, False, 0.0) is None  # they are on their way
    more = batches.begin(6, False, 0.0)
    assert more is not None
    assert more.count == 2
    urgent = batches.begin(6, True, 0.0)
    assert urgent is not None
    assert urgent.count == 6  # it hurries the others
    assert batches.begin(9, True, 0.0) is None
    for batch in (gentle, more, urgent):
        batches.end(batch, 1, 0.0)
    assert batches.begin(0, True, 0.0) is None
    assert batches.begin(1, True, 0.0) is not None


def test_after_a_batch_that_brought_nothing_there_is_a_pause() -> None:
    batches = Batches()
    batch = batches.begin(1, False, 5.0)
    assert batch is not None
    batches.end(batch, 0, 5.0)
    assert batches.begin(1, False, 5.9) is None
    urgent = batches.begin(1, True, 5.9)  # of the other kind
    assert urgent is not None
    batches.end(urgent, 1, 5.9)
    assert batches.begin(2, False, 6.0) is not None


def test_slabs_of_a_batch_without_hurry_are_hurried_and_no_others_twice() -> None:
    choice: BatchChoice[int] = BatchChoice(EvictionConfig(extra=0), Random(1))
    mapped = list(range(6))
    first = choice.take(choice.ask(mapped, 2, 0.0, in_hurry=False), {}, in_hurry=False)
    again = choice.ask(mapped, 6, 0.0, in_hurry=False)
    assert not set(again.asked) & set(first)
    urgent = choice.ask(mapped, 3, 0.0, in_hurry=True)
    assert set(urgent.hurried) == set(first)
    assert len(choice.take(urgent, {}, in_hurry=True)) == 1
    choice.moved(first[0])
    choice.refused(first[0], 0.0)
    assert first[0] not in choice.ask(mapped, 6, 1.0, in_hurry=True).asked
