# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.pace."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.pace import COST_MAX, TURN_S, Pace, Waits, waits

PAGE_IN_S = 50e-6
FAULTS_PER_S = 10_000.0


def job(rate: float, harmless_pages_per_s: float) -> Waits:
    """A job that does nothing but wait for pages: copies beyond a rate take from it."""
    slower = max(0.0, rate - harmless_pages_per_s) / harmless_pages_per_s
    return Waits(int(FAULTS_PER_S * TURN_S), FAULTS_PER_S * TURN_S * PAGE_IN_S * (1.0 + slower))


def live(pace: Pace, turns: int, page_ins: Callable[[float], Waits]) -> list[float]:
    """The rate in each turn."""
    rates = []
    for _ in range(turns):
        rates.append(pace.pages_per_s)
        pace.turn(TURN_S, page_ins(rates[-1]))
    return rates


def test_nobody_waits_so_copying_is_as_fast_as_it_can_be() -> None:
    pace = Pace()
    rates = live(pace, 10, lambda _: Waits())
    assert rates[1:] == [float("inf")] * 9
    assert live(pace, 3, lambda _: Waits(10, 0.01 * TURN_S)) == [float("inf")] * 3


def test_a_job_that_waits_for_pages_is_noticed_within_a_turn() -> None:
    pace = Pace()
    live(pace, 10, lambda _: Waits())
    rates = live(pace, 3, lambda _: job(0.0, 1e9))
    assert rates[0] == float("inf")
    assert rates[1] <= 4096.0


def test_copying_and_resting_take_turns() -> None:
    rates = live(Pace(), 100, lambda rate: job(rate, 1e9))
    assert all(bool(rate) == (turn % 2 == 0) for turn, rate in enumerate(rates))


@given(st.floats(2_000.0, 200_000.0), st.floats(0.0, 0.03), st.integers(0, 1 << 32))
def test_it_finds_the_rate_that_costs_next_to_nothing(
    harmless: float, noise: float, seed: int
) -> None:
    rng, pace = Random(seed), Pace()

    def page_ins(rate: float) -> Waits:
        seen = job(rate, harmless)
        return Waits(seen.count, seen.total_s * rng.uniform(1.0 - noise, 1.0 + noise))

    live(pace, 1000, page_ins)
    rates = [rate for rate in live(pace, 2000, page_ins) if rate]
    mean = sum(rates) / len(rates)
    assert mean > 0.5 * harmless
    assert sum(job(rate, harmless).mean_s / PAGE_IN_S - 1.0 for rate in rates) / len(rates) < (
        2.0 * COST_MAX
    )  # in the turns of copying, which are half of all


def test_a_rate_that_does_great_harm_is_left_at_once() -> None:
    pace = Pace()
    live(pace, 1000, lambda rate: job(rate, 1e9))
    fast = max(live(pace, 2, lambda rate: job(rate, 1e9)))
    slow = max(live(pace, 50, lambda rate: job(rate, 100.0))[48:])
    assert slow <= fast / 32  # 2.5 s later


def test_it_never_stands_still() -> None:
    pace = Pace()
    rates = live(pace, 5000, lambda rate: job(rate, 1.0))
    assert min(rate for rate in rates if rate) >= 512.0


def test_what_was_learned_does_not_outlive_a_pause() -> None:
    pace = Pace()
    live(pace, 1000, lambda rate: job(rate, 1e9))
    pace.begin()
    assert pace.pages_per_s == 4096.0


def test_page_ins_between_two_readings() -> None:
    bounds = [10_000, 20_000, 40_000, 10_000_000]
    seen = waits([5, 0, 1, 0], [5, 10, 11, 0], bounds)
    assert seen.count == 20
    assert seen.mean_s == pytest.approx(30e-6)
    held_up = waits([0, 0, 0, 0], [0, 100, 0, 1], bounds)
    assert held_up.mean_s < 25e-6  # one of 10 ms does not outweigh a hundred
    assert waits([3, 3, 3, 3], [0, 0, 0, 0], bounds) == Waits()  # another engine
