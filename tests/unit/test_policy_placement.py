# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.placement."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.placement import (
    Ask,
    BackoffConfig,
    Choose,
    DonorBook,
    Exhausted,
    MemoryUse,
    Placement,
)

USE = st.none() | st.builds(
    MemoryUse, used_share=st.floats(0.0, 1.0), slabs_mappable=st.integers(0, 3)
)
WORLD = st.dictionaries(st.integers(0, 11), USE, max_size=10)


def drive(
    placement: Placement[int], world: dict[int, MemoryUse | None]
) -> tuple[int | None, list[tuple[int, ...]]]:
    """Answers every question; returns the winner and what was asked."""
    asked: list[tuple[int, ...]] = []
    while isinstance(step := placement.next(), Ask):
        asked.append(step.donors)
        for donor in step.donors:
            placement.answered(donor, world[donor])
    return (step.donor if isinstance(step, Choose) else None), asked


def has_room(use: MemoryUse | None) -> bool:
    return use is not None and use.slabs_mappable > 0


@given(WORLD, st.sets(st.integers(0, 11)), st.integers(), st.integers(1, 4))
def test_new_donors_with_room_always_come_before_old_ones(
    world: dict[int, MemoryUse | None], holding: set[int], seed: int, choices: int
) -> None:
    chosen, _ = drive(Placement(world, holding, Random(seed), choices), world)
    roomy = {donor for donor, use in world.items() if has_room(use)}
    if chosen is None:
        assert not roomy
        return
    assert chosen in roomy
    if roomy - holding:
        assert chosen not in holding


@given(WORLD, st.sets(st.integers(0, 11)), st.integers())
def test_the_winner_uses_less_than_the_other_one_asked(
    world: dict[int, MemoryUse | None], holding: set[int], seed: int
) -> None:
    chosen, asked = drive(Placement(world, holding, Random(seed)), world)
    if chosen is None:
        return
    winner = world[chosen]
    assert winner is not None
    for donor in asked[-1]:
        other = world[donor]
        if other is not None and has_room(other):
            assert winner.used_share <= other.used_share


@given(WORLD, st.sets(st.integers(0, 11)), st.integers(), st.integers(1, 4))
def test_nobody_is_asked_twice_and_never_more_than_the_choices(
    world: dict[int, MemoryUse | None], holding: set[int], seed: int, choices: int
) -> None:
    _, asked = drive(Placement(world, holding, Random(seed), choices), world)
    flat = [donor for pair in asked for donor in pair]
    assert len(flat) == len(set(flat))
    assert all(1 <= len(pair) <= choices for pair in asked)
    assert all(not (set(pair) & holding) or set(pair) <= holding for pair in asked)


def test_a_refusal_goes_to_the_other_one_asked_then_on() -> None:
    world = {n: MemoryUse(n / 10, 1) for n in range(3)}
    placement = Placement(world, set(), Random(1))
    tried = []
    while True:
        chosen, _ = drive(placement, world)
        if chosen is None:
            break
        tried.append(chosen)
        placement.refused(chosen)
    assert sorted(tried) == [0, 1, 2]
    assert isinstance(placement.next(), Exhausted)


def test_two_choices_balance_better_than_one() -> None:
    def spread(choices: int) -> int:
        rng = Random(7)
        load = dict.fromkeys(range(20), 0)
        for _ in range(2000):
            world: dict[int, MemoryUse | None] = {
                donor: MemoryUse(count / 2000, 1) for donor, count in load.items()
            }
            chosen, _ = drive(Placement(world, set(), rng, choices), world)
            assert chosen is not None
            load[chosen] += 1
        return max(load.values()) - min(load.values())

    assert spread(2) < spread(1) / 4


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="choices"):
        Placement([1], [], Random(0), 0)
    placement = Placement([1], [], Random(0))
    with pytest.raises(ValueError, match="not asked"):
        placement.answered(1, None)
    placement.next()
    with pytest.raises(ValueError, match="not chosen"):
        placement.refused(1)


def test_no_donors_at_all() -> None:
    assert isinstance(Placement([], [1, 2], Random(0)).next(), Exhausted)


def test_an_unreachable_donor_is_asked_again_later_and_later() -> None:
    book: DonorBook[str] = DonorBook(BackoffConfig(unreachable_s=1, unreachable_s_max=4))
    waits = []
    now_s = 100.0
    for _ in range(4):
        book.unreachable("a", now_s)
        assert book.eligible(["a", "b"], now_s) == ["b"]
        retry_s = book.retry_s(["a", "b"], now_s)
        assert retry_s is not None
        waits.append(retry_s - now_s)
        now_s = retry_s
        assert book.eligible(["a", "b"], now_s) == ["a", "b"]
    assert waits == [1, 2, 4, 4]
    book.good("a")
    book.unreachable("a", now_s)
    assert book.retry_s(["a"], now_s) == now_s + 1


def test_a_full_donor_waits_a_fixed_time() -> None:
    book: DonorBook[str] = DonorBook(BackoffConfig(full_s=2))
    book.full("a", 0.0)
    book.full("a", 0.0)
    assert book.eligible(["a"], 1.9) == []
    assert book.eligible(["a"], 2.0) == ["a"]
    assert book.retry_s(["b"], 0.0) is None


def test_failures_without_end_do_not_overflow() -> None:
    book: DonorBook[str] = DonorBook()
    for _ in range(5000):
        book.unreachable("a", 0.0)
    assert book.retry_s(["a"], 0.0) == 30.0
