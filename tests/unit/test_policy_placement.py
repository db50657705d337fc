# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.placement."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.config import PolicyConfig
from infiniswap.policy.placement import Ask, Choose, Exhausted, MemoryUse, Placement

USE = st.none() | st.builds(
    MemoryUse, used_share=st.floats(0.0, 1.0), slabs_mappable=st.integers(0, 3)
)
WORLD = st.dictionaries(st.integers(0, 11), USE, max_size=10)


def placed(
    donors: Collection[int], holding: Collection[int] = (), seed: int = 0, choices: int = 2
) -> Placement[int]:
    return Placement(list(donors), holding, Random(seed), PolicyConfig(choices=choices))


def drive(
    placement: Placement[int], world: Mapping[int, MemoryUse | None]
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
    chosen, _ = drive(placed(world, holding, seed, choices), world)
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
    chosen, asked = drive(placed(world, holding, seed), world)
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
    _, asked = drive(placed(world, holding, seed, choices), world)
    flat = [donor for pair in asked for donor in pair]
    assert len(flat) == len(set(flat))
    assert all(1 <= len(pair) <= choices for pair in asked)
    assert all(not (set(pair) & holding) or set(pair) <= holding for pair in asked)


def test_a_refusal_goes_to_the_other_one_asked_then_on() -> None:
    world = {n: MemoryUse(n / 10, 1) for n in range(3)}
    placement = placed(world)
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
            world = {donor: MemoryUse(count / 2000, 1) for donor, count in load.items()}
            policy = PolicyConfig(choices=choices)
            chosen, _ = drive(Placement(list(world), set(), rng, policy), world)
            assert chosen is not None
            load[chosen] += 1
        return max(load.values()) - min(load.values())

    assert spread(2) < spread(1) / 4


def test_each_donor_is_asked_equally_often() -> None:
    rng, policy = Random(3), PolicyConfig()
    counts = [0] * 7
    for _ in range(7_000):
        step = Placement(range(7), (), rng, policy).next()
        assert isinstance(step, Ask)
        for donor in step.donors:
            counts[donor] += 1
    assert all(abs(count - 2_000) < 200 for count in counts)


@given(st.permutations(range(6)), st.integers(0, 6), st.sets(st.integers(0, 5)), st.integers())
def test_who_was_drawn_before_is_asked_first_and_once(
    order: list[int], count: int, holding: set[int], seed: int
) -> None:
    donors, drawn = range(1, 6), order[:count]  # donor 0 has gone since
    placement = Placement(donors, holding, Random(seed), PolicyConfig(choices=2), drawn=drawn)
    _, asked = drive(placement, dict.fromkeys(donors))
    everybody = [donor for step in asked for donor in step]
    assert sorted(everybody) == list(donors)
    for group in (holding, set(donors) - holding):
        first = [donor for donor in drawn if donor in group and donor in donors]
        assert [donor for donor in everybody if donor in group][: len(first)] == first


def test_a_donor_that_may_not_be_asked_is_left_out() -> None:
    world = {n: MemoryUse(0.5, 1) for n in range(6)}
    placement = Placement(list(world), [0, 1], Random(1), PolicyConfig(), lambda donor: donor > 0)
    asked: list[int] = []
    while not isinstance(step := placement.next(), Exhausted):
        if isinstance(step, Choose):
            placement.refused(step.donor)
            continue
        asked += step.donors
        for donor in step.donors:
            placement.answered(donor, world[donor])
    assert set(asked[:4]) == {2, 3, 4, 5}
    assert asked[4:] == [1]


def test_misuse_is_refused() -> None:
    placement = placed([1])
    with pytest.raises(ValueError, match="not asked"):
        placement.answered(1, None)
    placement.next()
    with pytest.raises(ValueError, match="not chosen"):
        placement.refused(1)
