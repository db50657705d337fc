# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.wakeup."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.wakeup import Wakefulness, WakefulnessConfig

STEPS = st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(0, 2000)), max_size=40)


def test_fast_page_ins_wake_and_a_pause_lets_sleep() -> None:
    wakefulness = Wakefulness(WakefulnessConfig())
    assert not wakefulness.tick(0.0, 1_000_000)
    assert not wakefulness.tick(0.25, 1_000_020)  # 80/s
    assert wakefulness.tick(0.5, 1_000_050)  # 120/s
    assert wakefulness.tick(1.0, 1_000_050)
    assert wakefulness.tick(1.5, 1_000_050)
    assert not wakefulness.tick(1.501, 1_000_050)


def test_exactly_the_threshold_is_not_worth_it() -> None:
    wakefulness = Wakefulness(WakefulnessConfig(awake_pages_per_s=100.0))
    wakefulness.tick(0.0, 0)
    assert not wakefulness.tick(1.0, 100)
    assert wakefulness.tick(2.0, 201)


def test_pages_of_ticks_without_time_count_in_the_next() -> None:
    wakefulness = Wakefulness(WakefulnessConfig())
    wakefulness.tick(5.0, 0)
    assert not wakefulness.tick(5.0, 1000)
    assert not wakefulness.tick(4.0, 1000)
    assert wakefulness.tick(6.0, 1000)


def test_a_total_that_went_down_starts_again_from_zero() -> None:
    wakefulness = Wakefulness(WakefulnessConfig())
    wakefulness.tick(0.0, 1000)
    assert not wakefulness.tick(1.0, 30)
    wakefulness.tick(2.0, 1000)
    assert wakefulness.tick(4.0, 500)


@pytest.mark.parametrize("wrong", [{"awake_pages_per_s": -1.0}, {"awake_s": -0.1}])
def test_values_below_zero_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="below zero"):
        WakefulnessConfig(**wrong)


@given(STEPS, st.floats(0.0, 500.0), st.floats(0.0, 5.0))
def test_awake_exactly_while_a_busy_tick_is_near(
    steps: list[tuple[float, int]], threshold: float, awake_s: float
) -> None:
    wakefulness = Wakefulness(WakefulnessConfig(threshold, awake_s))
    now_s, total, busy_s = 0.0, 0, []
    assert not wakefulness.tick(now_s, total)
    for elapsed_s, pages in steps:
        before_s, now_s, total = now_s, now_s + elapsed_s, total + pages
        if pages > threshold * (now_s - before_s):
            busy_s.append(now_s)
        assert wakefulness.tick(now_s, total) == any(now_s - at <= awake_s for at in busy_s)


@given(STEPS)
def test_it_never_stays_awake_without_pages(steps: list[tuple[float, int]]) -> None:
    wakefulness = Wakefulness(WakefulnessConfig())
    now_s, total = 0.0, 0
    for elapsed_s, pages in steps:
        now_s, total = now_s + elapsed_s, total + pages
        wakefulness.tick(now_s, total)
    assert not wakefulness.tick(now_s + 1.5, total)
