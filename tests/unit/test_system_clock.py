# SPDX-License-Identifier: Apache-2.0
"""A clock that jumps is made into one that does not run backwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.system.clock import AHEAD_S, SteadyClock


class Below:
    """The clock below, as it is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_it_goes_as_the_clock_below_does() -> None:
    below = Below()
    clock = SteadyClock(below)
    for step_s in (0.0, 0.25, 60.0, AHEAD_S):
        below.now_s += step_s
        assert clock() == below.now_s
    assert not clock.counters


@pytest.mark.parametrize(
    ("jump_s", "shown_s", "said"),
    [(-3600.0, 1000.0, "back by 3600.0 s"), (86_400.0, 87_400.0, "ahead by 86400.0 s")],
)
def test_a_jump_is_counted_and_told_and_only_one_ahead_is_believed(
    caplog: pytest.LogCaptureFixture, jump_s: float, shown_s: float, said: str
) -> None:
    below = Below()
    clock = SteadyClock(below)
    below.now_s += jump_s
    assert clock() == shown_s
    below.now_s += 5.0
    assert clock() == shown_s + 5.0
    assert clock.counters == {"clock_jumps": 1}
    assert f"the clock went {said}" in caplog.text


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
