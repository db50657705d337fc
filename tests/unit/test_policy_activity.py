# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.ewma and activity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.config import PolicyConfig
from infiniswap.policy.activity import ActivityTracker
from infiniswap.policy.ewma import Ewma, blend

WEIGHT = st.floats(0.001, 1.0)
VALUE = st.floats(0.0, 1e12)


@given(st.lists(st.tuples(st.floats(0.0, 1e4), VALUE), min_size=1), WEIGHT)
def test_the_average_stays_within_the_range_of_its_inputs(
    steps: list[tuple[float, float]], weight: float
) -> None:
    average = Ewma(weight)
    now_s = 0.0
    values = []
    for elapsed_s, value in steps:
        now_s += elapsed_s
        values.append(value)
        assert min(values) <= average.update(now_s, value) <= max(values)


def test_one_punctual_update_is_the_papers_formula() -> None:
    assert blend(100.0, 50.0, 0.2) == pytest.approx(0.2 * 50 + 0.8 * 100)


@given(WEIGHT, VALUE, VALUE, st.integers(1, 50))
def test_a_late_update_counts_as_much_as_punctual_ones(
    weight: float, old: float, value: float, periods: int
) -> None:
    punctual = old
    for _ in range(periods):
        punctual = blend(punctual, value, weight)
    assert blend(old, value, weight, periods) == pytest.approx(punctual, rel=1e-6, abs=1e-3)


def test_a_measurement_of_the_same_moment_changes_nothing() -> None:
    average = Ewma(0.5)
    average.update(1.0, 10.0)
    assert average.update(1.0, 1000.0) == 10.0
    assert average.update(0.5, 1000.0) == 10.0


@pytest.mark.parametrize("weight", [0.0, -0.1, 1.1])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Ewma(weight)


def test_a_steady_slab_gets_hot_and_cools_down() -> None:
    tracker = ActivityTracker(2, PolicyConfig(), 0.0)
    for second in range(1, 30):
        tracker.tick(float(second), [40 * second, 0])
    assert tracker.activity(0) == pytest.approx(40.0, rel=0.01)
    assert tracker.hottest([0, 1]) == [0]
    for second in range(30, 60):
        tracker.tick(float(second), [40 * 29, 0])
    assert tracker.hottest([0, 1]) == []


def test_exactly_the_threshold_is_not_hot() -> None:
    tracker = ActivityTracker(1, PolicyConfig(activity_alpha=1.0), 0.0)
    tracker.tick(1.0, [20])
    assert not tracker.is_hot(0)
    tracker.tick(2.0, [41])
    assert tracker.is_hot(0)


@given(
    st.lists(
        st.tuples(st.floats(0.001, 100.0), st.lists(st.integers(0, 10**6), min_size=3, max_size=3)),
        min_size=1,
        max_size=30,
    )
)
def test_activity_never_exceeds_the_highest_rate_seen(
    steps: list[tuple[float, list[int]]],
) -> None:
    tracker = ActivityTracker(3, PolicyConfig(), 0.0)
    totals = [0, 0, 0]
    highest = [0.0, 0.0, 0.0]
    now_s = 0.0
    for elapsed_s, pages in steps:
        before_s, now_s = now_s, now_s + elapsed_s
        totals = [total + more for total, more in zip(totals, pages, strict=True)]
        tracker.tick(now_s, totals)
        for slab in range(3):
            highest[slab] = max(highest[slab], pages[slab] / (now_s - before_s))
            assert 0.0 <= tracker.activity(slab) <= highest[slab]


def test_a_tick_without_time_is_left_for_the_next() -> None:
    tracker = ActivityTracker(1, PolicyConfig(activity_alpha=1.0), 5.0)
    tracker.tick(5.0, [100])
    assert tracker.activity(0) == 0.0
    tracker.tick(7.0, [100])
    assert tracker.activity(0) == pytest.approx(50.0)


def test_a_total_that_went_down_starts_again_from_zero() -> None:
    tracker = ActivityTracker(1, PolicyConfig(activity_alpha=1.0), 0.0)
    tracker.tick(1.0, [1000])
    tracker.tick(2.0, [30])
    assert tracker.activity(0) == pytest.approx(30.0)


def test_the_hottest_come_first_and_ties_go_by_number() -> None:
    tracker = ActivityTracker(4, PolicyConfig(activity_alpha=1.0), 0.0)
    tracker.tick(1.0, [50, 90, 50, 1])
    assert tracker.hottest([3, 2, 1, 0]) == [1, 0, 2]
    assert tracker.hottest([0]) == [0]


def test_a_wrong_number_of_totals_is_refused() -> None:
    with pytest.raises(ValueError, match="totals"):
        ActivityTracker(2, PolicyConfig(), 0.0).tick(1.0, [1])
