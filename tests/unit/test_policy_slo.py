# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.slo: in closed loop with a service whose latency depends on what is lent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infiniswap.policy.slo import UNLIMITED, Advice, SloPolicy

SETTLE_S = 10.0
FEW = settings(max_examples=15)
"""Each example lives for many minutes."""
MAX = 48


@dataclass
class Donor:
    """Lends a slab a second where it may, and gives back at once what it has to."""

    mapped: int = MAX
    policy: SloPolicy = field(default_factory=lambda: SloPolicy(1.0, SETTLE_S))
    advice: list[Advice] = field(default_factory=list)
    lends: list[bool] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def run(self, latency: Callable[[int, int], float], seconds: int) -> Donor:
        begin = len(self.advice)
        for second in range(begin, begin + seconds):
            self.policy.observe(float(second), latency(second, self.mapped))
            advice = self.policy.advise(float(second), self.mapped, MAX)
            assert 0 <= advice.give_back <= self.mapped
            lends = self.mapped < advice.mapped_max
            assert not (lends and advice.give_back)
            self.mapped -= advice.give_back
            self.mapped += lends and self.mapped < MAX
            self.advice.append(advice)
            self.lends.append(advice.mapped_max > self.mapped or self.mapped == MAX)
            self.counts.append(self.mapped)
        return self

    @property
    def changes(self) -> int:
        """Between lending and not."""
        return sum(before != after for before, after in itertools.pairwise(self.lends))


def steady(level: float) -> Callable[[int, int], float]:
    return lambda _second, _mapped: level


def test_a_service_that_is_well_changes_nothing() -> None:
    donor = Donor(mapped=0).run(steady(0.8), 200)
    assert donor.mapped == MAX
    assert not any(advice.give_back for advice in donor.advice)


def test_nothing_more_is_lent_in_danger_and_slabs_go_back_only_above_the_bound() -> None:
    assert Donor(mapped=10).run(steady(0.95), 1000).counts == [10] * 1000
    above = Donor(mapped=10).run(steady(1.05), 1000)
    assert above.counts[:10] == [10] * 10
    assert above.counts[10] == 8
    assert above.mapped == 0


def test_a_peak_takes_nothing_back_and_holds_for_three_settle_times() -> None:
    donor = Donor(mapped=10).run(lambda second, _: 5.0 if second == 3 else 0.5, 100)
    assert donor.lends.index(False) == 3
    assert not any(advice.give_back for advice in donor.advice)
    # The average has to fall below 0.9 first.
    assert 3 * SETTLE_S <= sum(not one for one in donor.lends[:50]) <= 4.5 * SETTLE_S
    assert donor.mapped == MAX


@pytest.mark.parametrize("bearable", [0, 7, 47])
def test_what_a_service_bears_is_found_and_kept(bearable: int) -> None:
    donor = Donor().run(lambda _, mapped: 0.8 if mapped <= bearable else 1.2, 8_000)
    late = donor.counts[4_000:]
    assert sum(late) / len(late) >= 0.7 * bearable
    assert sum(count > bearable for count in late) <= 0.06 * len(late)
    # Each attempt waits for 64 settle times.
    assert donor.changes <= 40 + 2 * 8_000 / (64 * SETTLE_S)


@FEW
@given(st.floats(0.0, 3.0), st.floats(0.0, 0.05), st.floats(0.0, 0.3), st.integers(0, 1 << 32))
def test_the_number_of_changes_is_bounded_whatever_the_noise(
    own: float, each: float, noise: float, seed: int
) -> None:
    rng = Random(seed)
    seconds = 1200
    donor = Donor().run(
        lambda _, mapped: max(0.0, own + each * mapped + rng.gauss(0.0, noise)), seconds
    )
    # Lending follows on three settle times of calm, and ends with its step or with danger.
    assert donor.changes <= 2 + 2 * seconds / (3 * SETTLE_S)
    returns = [second for second, advice in enumerate(donor.advice) if advice.give_back]
    assert all(after - before >= SETTLE_S for before, after in itertools.pairwise(returns))


@FEW
@given(
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0.1, 0.95, 1.01, 9.0])), max_size=8)
)
def test_lending_returns_when_the_danger_is_over(phases: list[tuple[int, float]]) -> None:
    donor = Donor()
    for seconds, level in phases:
        donor.run(steady(level), seconds)
    # The longest wait, its halves, and the steps from nothing to the whole pool.
    donor.run(steady(0.5), int((2 * 64 + 3 * 20) * SETTLE_S))
    assert donor.mapped == MAX


def test_without_a_latency_the_last_state_counts_for_a_while_then_the_cautious_one() -> None:
    policy = SloPolicy(1.0, SETTLE_S)
    assert policy.advise(0.0, 5, MAX) == Advice(0)
    policy.observe(1.0, 0.5)
    assert policy.advise(31.0, 5, MAX) == Advice(UNLIMITED)
    assert policy.advise(31.1, 5, MAX) == Advice(0)
    policy.observe(40.0, 0.5)
    assert policy.advise(40.0, 5, MAX) == Advice(UNLIMITED)


def test_nothing_is_taken_back_by_an_old_latency() -> None:
    donor = Donor(mapped=20).run(steady(2.0), 9)
    assert donor.mapped == 20
    policy = donor.policy
    assert policy.advise(40.0, 20, MAX) == Advice(0)
    policy.observe(50.0, 0.5)  # the average begins with this one
    assert not policy.in_danger
    assert not policy.advise(50.0, 20, MAX).give_back


def test_slabs_whose_owners_keep_them_are_asked_for_until_it_holds() -> None:
    policy = SloPolicy(1.0, SETTLE_S)
    for second in range(100):
        policy.observe(float(second), 2.0)
        advice = policy.advise(float(second), 8, MAX)
    assert advice.give_back == 2
    policy.observe(100.0, 0.5)
    assert policy.advise(100.0, 8, MAX) == Advice(8)


@pytest.mark.parametrize(("bound", "settle_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_a_bound_and_a_time_are_above_zero(bound: float, settle_s: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        SloPolicy(bound, settle_s)


def test_the_latency_is_the_newest() -> None:
    policy = SloPolicy(1.0, SETTLE_S)
    assert policy.latency == 0.0
    policy.observe(0.0, 0.25)
    assert math.isclose(policy.latency, 0.25)
