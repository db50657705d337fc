# SPDX-License-Identifier: Apache-2.0
"""A clock that jumps is made into one that does not run backwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.system.clock import AHEAD_S, SteadyClock


class Below:
    """The clock below, as it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_it_goes_as_the_clock_below_does() -> None:
    below = Below()
    clock = SteadyClock(below)
    for step_s in (0.0, 0.25, 60.0, AHEAD_S):
        below.now_s += step_s
        assert clock() == below.now_s
    assert not clock.counters


def test_a_jump_back_is_counted_told_and_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    below = Below()
    clock = SteadyClock(below)
    before_s = clock()
    below.now_s -= 3600.0
    assert clock() == before_s
    below.now_s += 5.0
    assert clock() == before_s + 5.0
    assert clock.counters == {"clock_jumps": 1}
    assert "the clock went back by 3600.0 s" in caplog.text


def test_a_jump_ahead_is_counted_told_and_believed(caplog: pytest.LogCaptureFixture) -> None:
    below = Below()
    clock = SteadyClock(below)
    below.now_s += 86_400.0
    assert clock() == below.now_s
    assert clock.counters == {"clock_jumps": 1}
    assert "the clock went ahead by 86400.0 s" in caplog.text


@given(steps_s=st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_it_never_runs_backwards(steps_s: list[float]) -> None:
    below = Below()
    clock = SteadyClock(below)
    last_s = clock()
    for step_s in steps_s:
        below.now_s += step_s
        now_s = clock()
        assert now_s >= last_s - 1e-6  # rounding
        last_s = now_s
