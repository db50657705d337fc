# SPDX-License-Identifier: Apache-2.0
"""The daemons' policies beside closed forms (infiniswap.simulation.theory)."""

from __future__ import annotations

import math
from random import Random

import pytest

from infiniswap.config import PolicyConfig
from infiniswap.simulation import studies, theory
from infiniswap.simulation.scenario import Choices, Eviction

TWO_CHOICES = (0.7616, 0.2295, 0.0089)


def test_the_closed_forms() -> None:
    assert theory.all_light(24, 6, 10, 5) == pytest.approx(0.963, abs=5e-4)
    assert theory.all_light_limit(0.25, 10, 5) == pytest.approx(0.852, abs=5e-4)
    assert theory.all_light(24_000, 6_000, 10, 5) == pytest.approx(0.852, abs=1e-3)
    assert theory.all_light(24, 0, 10, 0) == 1.0
    assert theory.all_light(24, 24, 10, 5) == 0.0
    found = theory.two_choices(3)
    assert found == pytest.approx(TWO_CHOICES, abs=5e-5)
    assert found[0] == pytest.approx(math.tanh(1.0), abs=1e-6)
    # One choice: a Poisson distribution.
    one = theory.two_choices(2, choices=1)
    assert one == pytest.approx([1 - math.exp(-1), 1 - 2 * math.exp(-1)], abs=1e-6)


def test_batch_eviction_spares_busy_slabs_as_often_as_sampling_without_replacement_does() -> None:
    for row in studies.eviction(Eviction(extra=(5, 6), batches=20_000), seed=1):
        assert row.seen == pytest.approx(row.exact, rel=0.01)
        if row.extra == 5:
            assert abs(row.seen - row.binomial) > 0.1


def test_two_choices_spread_slabs_as_theory_has_it() -> None:
    (row,) = studies.choices(Choices(donors=(20_000,)), PolicyConfig(), seed=1)
    for seen, exact, close in zip(row.seen, TWO_CHOICES, (0.01, 0.02, 0.15), strict=False):
        assert seen == pytest.approx(exact, rel=close)
    (random,) = studies.choices(Choices(donors=(20_000,)), PolicyConfig(choices=1), seed=1)
    assert random.seen[0] == pytest.approx(1 - math.exp(-1), rel=0.02)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_choices_are_within_one_percent_at_100_000_donors() -> None:
    # About 890 donors have three slabs or more, give or take thirty in one run: forty runs.
    donors, runs = 100_000, 40
    counts = [0, 0, 0]
    for seed in range(runs):
        loads = studies.place_one_by_one(donors, PolicyConfig(), Random(seed))
        for level in range(3):
            counts[level] += sum(load > level for load in loads)
    seen = [number / (donors * runs) for number in counts]
    assert seen == pytest.approx(TWO_CHOICES, rel=0.01)
