# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.rate, and what sessions make of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.control.channel import Limits
from infiniswap.control.client import limits_of
from infiniswap.control.rate import Rate, RateLimit

STEPS = st.lists(st.floats(0, 10), max_size=300)


@given(STEPS, st.integers(1, 50), st.floats(0.1, 100))
def test_no_more_is_borne_than_burst_and_rate_allow(
    steps: list[float], burst: int, per_s: float
) -> None:
    limit = RateLimit(Rate(burst, per_s))
    now_s, taken = 1000.0, 0
    for step in steps:
        now_s += step
        taken += limit.take(now_s)
        assert taken <= burst + per_s * (now_s - 1000.0) + 1e-6


@given(st.integers(1, 50), st.floats(0.1, 100), st.integers(1, 500))
def test_who_keeps_the_rate_is_never_refused(burst: int, per_s: float, count: int) -> None:
    limit = RateLimit(Rate(burst, per_s))
    assert all(limit.take(number * (1 / per_s) * 1.000001) for number in range(count))


def test_a_clock_that_goes_back_gives_nothing() -> None:
    limit = RateLimit(Rate(1, 1.0))
    assert limit.take(10.0)
    assert not limit.take(5.0)
    assert limit.take(6.0)


@pytest.mark.parametrize(
    ("heartbeat_ms", "silence_ms", "heartbeat_s", "missed_max"),
    [
        (1000, 5000, 1.0, 5),
        (50, 5000, 0.05, 100),
        (0, 0, 0.05, 1),  # would have us ping without end
        (1, (1 << 31) - 1, 0.05, 100),
        ((1 << 31) - 1, (1 << 31) - 1, 60.0, 100),  # would have us believe in it for weeks
        (60_000, 1, 60.0, 1),
    ],
)
def test_a_donor_names_the_heartbeat_within_what_can_be_configured(
    heartbeat_ms: int, silence_ms: int, heartbeat_s: float, missed_max: int
) -> None:
    welcome = SimpleNamespace(heartbeat_ms=heartbeat_ms, silence_ms=silence_ms)
    limits = limits_of(cast(Any, welcome), 5.0)
    assert (limits.heartbeat_s, limits.missed_max) == (heartbeat_s, missed_max)


@pytest.mark.parametrize("heartbeat_s", [0.05, 1.0, 60.0])
def test_the_heartbeats_of_an_honest_peer_are_borne_after_any_pause(heartbeat_s: float) -> None:
    limits = Limits(heartbeat_s=heartbeat_s, missed_max=100)
    beats = RateLimit(limits.beats)
    for beat in range(1000):
        # A ping and a pong each time; what a pause has held back comes at once, at its end.
        now_s = -(-beat // limits.missed_max) * limits.missed_max * heartbeat_s
        assert beats.take(now_s)
        assert beats.take(now_s)
