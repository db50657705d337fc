# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.keep_awake."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infiniswap.policy.keep_awake import KeepAwakeConfig, KeepAwakePolicy

STEPS = st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(0, 2000)), max_size=40)


def test_fast_page_ins_wake_and_a_pause_lets_sleep() -> None:
    policy = KeepAwakePolicy(KeepAwakeConfig())
    assert not policy.tick(0.0, 1_000_000)
    assert not policy.tick(0.25, 1_000_020)  # 80/s
    assert policy.tick(0.5, 1_000_050)  # 120/s
    assert policy.tick(1.0, 1_000_050)
    assert policy.tick(1.5, 1_000_050)
    assert not policy.tick(1.501, 1_000_050)


def test_pages_of_ticks_without_time_count_in_the_next() -> None:
    policy = KeepAwakePolicy(KeepAwakeConfig())
    policy.tick(5.0, 0)
    assert not policy.tick(5.0, 1000)
    assert not policy.tick(4.0, 1000)
    assert policy.tick(6.0, 1000)


def test_a_total_that_went_down_starts_again_from_zero() -> None:
    policy = KeepAwakePolicy(KeepAwakeConfig())
    policy.tick(0.0, 1000)
    assert not policy.tick(1.0, 30)
    policy.tick(2.0, 1000)
    assert policy.tick(4.0, 500)


@pytest.mark.parametrize("wrong", [{"awake_pages_per_s": -1.0}, {"awake_s": -0.1}])
def test_values_below_zero_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="below zero"):
        KeepAwakeConfig(**wrong)


@example([(1.0, 100), (1.0, 101)], 100.0, 0.5)  # exactly the threshold is not worth it
@given(STEPS, st.floats(0.0, 500.0), st.floats(0.0, 5.0))
def test_awake_exactly_while_a_busy_tick_is_near(
    steps: list[tuple[float, int]], threshold: float, awake_s: float
) -> None:
    policy = KeepAwakePolicy(KeepAwakeConfig(threshold, awake_s))
    now_s, total, busy_s = 0.0, 0, []
    assert not policy.tick(now_s, total)
    for elapsed_s, pages in steps:
        before_s, now_s, total = now_s, now_s + elapsed_s, total + pages
        if pages > threshold * (now_s - before_s):
            busy_s.append(now_s)
        assert policy.tick(now_s, total) == any(now_s - at <= awake_s for at in busy_s)
