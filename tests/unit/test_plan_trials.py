# SPDX-License-Identifier: Apache-2.0
"""The limits that a plan tries, on jobs whose time at each limit is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.planning.misses import Look
from infiniswap.planning.prediction import Model, Point, Probe, fit
from infiniswap.planning.trials import TRIALS_MAX, LimitSearch, Trial, curve
from infiniswap.units import MIB

PEAK, HELD, LOWEST = 1000, 1100, 250
"""In MiB."""

ALONE_S = 10.0

Curve = Callable[[int], float]
"""The slowdown with so many MiB."""


def model(lost_s: float) -> Model:
    """Of a job that lost so much with half of its memory; the curve is even."""
    return fit(ALONE_S, PEAK * MIB, probe(lost_s), held_bytes=HELD * MIB)


def probe(lost_s: float) -> Probe:
    """Its run with half of its memory."""
    half = PEAK // 2 * MIB
    looks = (Look(0, 0.0, half, PEAK * MIB, 0, 0), Look(1, ALONE_S, half, PEAK * MIB, 0, 0))
    return Probe(ALONE_S + lost_s, 1.0, half, 100_000, 100_000, (), looks)


def searched(curve: Curve, slowdown: float, lost_s: float = 10.0) -> LimitSearch:
    """All trials of a job."""
    search = LimitSearch(model(lost_s), slowdown, LOWEST * MIB)
    while (limit_bytes := search.next_bytes()) is not None:
        assert limit_bytes % MIB == 0
        slow = curve(limit_bytes // MIB)
        is_lifted = slow > 1.0 + max(0.2, 2 * (slowdown - 1.0))
        search.note(Trial(limit_bytes, ALONE_S * slow, 5, is_lifted))
    return search


def line(at: int, slope: float) -> Curve:
    """A job that loses nothing with so much memory, and evenly more with less."""
    return lambda limit: 1.0 + max(0, at - limit) * slope


@given(st.integers(300, HELD), st.floats(1e-5, 1.0), st.floats(1.01, 3.0), st.floats(0.0, 100.0))
def test_what_is_recommended_is_quick_enough(
    at: int, slope: float, slowdown: float, lost_s: float
) -> None:
    curve = line(at, slope)
    search = searched(curve, slowdown, lost_s)
    best = search.recommended()
    assert len(search.tried) <= TRIALS_MAX
    assert curve(best.limit_bytes // MIB) <= slowdown + 0.05
    limits = [trial.limit_bytes for trial in search.tried]
    assert len(set(limits)) == len(limits)
    assert all(LOWEST * MIB <= limit < HELD * MIB for limit in limits)


@given(st.integers(900, HELD), st.floats(6e-4, 2e-3))
def test_little_memory_is_recommended_in_vain(at: int, slope: float) -> None:
    best = searched(line(at, slope), 1.1).recommended()
    wanted = at - 0.1 / slope
    assert best.limit_bytes / MIB - wanted <= 0.15 * PEAK


def test_a_limit_that_is_as_foreseen_is_tried_once() -> None:
    foreseen = model(10.0)
    search = searched(lambda limit: foreseen.at(limit * MIB).slowdown, 1.3)
    assert len(search.tried) == 1
    best, trial = search.recommended(), search.tried[0]
    assert best == Point(
        trial.limit_bytes,
        trial.elapsed_s,
        trial.elapsed_s / ALONE_S,
        5,
        PEAK * MIB - best.limit_bytes,
        "measured",
    )


def test_a_cliff_leaves_all_that_the_job_holds() -> None:
    search = searched(lambda limit: 5.0 if limit < HELD else 1.0, 1.1)
    assert search.tried
    best = search.recommended()
    assert (best.limit_bytes, best.slowdown, best.remote_bytes) == (HELD * MIB, 1.0, 0)


def test_a_limit_that_would_save_next_to_nothing_is_not_tried() -> None:
    steep = fit(ALONE_S, PEAK * MIB, probe(1e4))
    assert LimitSearch(steep, 1.1, LOWEST * MIB).next_bytes() is None


def test_a_job_that_loses_nothing_gets_the_lowest_limit() -> None:
    search = searched(lambda _: 1.0, 1.1, lost_s=0.0)
    assert [trial.limit_bytes for trial in search.tried] == [LOWEST * MIB]
    assert search.recommended().limit_bytes == LOWEST * MIB


@pytest.mark.parametrize("slow", [1.02, 1.3])
def test_what_was_quick_enough_is_kept(slow: float) -> None:
    search = LimitSearch(model(10.0), 1.1, LOWEST * MIB)
    first = search.next_bytes()
    assert first is not None
    search.note(Trial(first, 10.2, 1))
    second = search.next_bytes()
    assert second is not None
    assert second < first
    search.note(Trial(second, ALONE_S * slow, 1, is_lifted=slow > 1.2))
    assert search.recommended().limit_bytes == (second if slow < 1.15 else first)


def test_a_trial_that_is_quicker_than_the_runs_without_a_limit_corrects_their_time() -> None:
    search = LimitSearch(model(10.0), 1.1, LOWEST * MIB)
    first = search.next_bytes()
    assert first is not None
    search.note(Trial(first, 9.0, 5))
    assert search.model.elapsed_s == 9.0
    second = search.next_bytes()
    assert second is not None
    search.note(Trial(second, 10.0, 5))
    best = search.recommended()
    assert best.limit_bytes == second
    assert best.slowdown == pytest.approx(10.0 / 9.0)


def test_a_job_that_uses_next_to_nothing_gets_what_a_run_accepts() -> None:
    small = fit(ALONE_S, 5 * MIB, probe(0.0), held_bytes=6 * MIB)
    search = LimitSearch(small, 1.1, 16 * MIB)
    assert search.next_bytes() is None
    assert search.recommended().limit_bytes == 16 * MIB


# ------------------------------------------------------------------------- what is known then


def curve_of(*ran: Trial, lost_s: float = 10.0) -> dict[int, Point]:
    """The points by their MiB, of a job whose run with half of its memory was as foreseen."""
    half = Trial(PEAK // 2 * MIB, ALONE_S + lost_s, 100_000)
    points = curve(model(lost_s), (half, *ran))
    return {point.limit_bytes // MIB: point for point in points}


def test_nothing_is_said_below_the_lowest_limit_that_ran() -> None:
    assert min(curve_of()) == PEAK // 2
    assert min(curve_of(Trial(300 * MIB, 30.0, 9))) == 300


def test_a_measured_limit_replaces_what_was_foreseen() -> None:
    found = curve_of(Trial(903 * MIB, 10.7, 50))
    assert 900 not in found
    assert (found[903].elapsed_s, found[903].page_ins) == (10.7, 50)
    assert found[903].source == found[500].source == "measured"
    assert found[950].source == found[850].source == "estimated"


def test_no_estimate_contradicts_a_run() -> None:
    slow = curve_of(Trial(980 * MIB, 17.0, 0))
    assert [slow[limit].elapsed_s for limit in (950, 900, 850)] == [17.0] * 3
    quick = curve_of(Trial(600 * MIB, 10.1, 20))
    assert all(quick[limit].elapsed_s <= 10.1 for limit in (950, 800, 650))
    assert all(quick[limit].page_ins <= 20 for limit in (950, 800, 650))
    disturbed = curve_of(Trial(980 * MIB, 30.0, 0, is_lifted=True))
    assert (disturbed[900].source, disturbed[900].elapsed_s) == ("estimated", 20.0)


def test_below_a_run_that_lost_its_limit_is_at_least_its_time() -> None:
    found = curve_of(Trial(980 * MIB, 17.0, 0, is_lifted=True))
    assert (found[980].source, found[980].elapsed_s) == ("at least", 17.0)
    assert (found[900].source, found[900].elapsed_s) == ("at least", 17.0)
    assert found[500].source == "measured"


def test_a_run_that_was_cut_short_counts_what_it_saw() -> None:
    half = PEAK // 2 * MIB
    looks = (
        Look(0, 0.0, half, PEAK * MIB, 0, 0),
        Look(1, ALONE_S / 4, 1 << 40, PEAK * MIB, 0, 0),
        Look(2, ALONE_S, 1 << 40, PEAK * MIB, 0, 0),
    )
    whole, cut = (
        fit(ALONE_S, PEAK * MIB, Probe(60.0, 0.25, half, 80_000, 90_000, (), looks, is_cut=is_cut))
        for is_cut in (False, True)
    )
    assert cut.at(half) == whole.at(half)
    seen = curve(cut, [Trial(half, 60.0, 80_000, is_lifted=True)])
    assert {point.source for point in seen[1:]} == {"at least"}
    least = next(point for point in seen if point.limit_bytes == 600 * MIB // 4096 * 4096)
    assert least.page_ins == pytest.approx(whole.at(600 * MIB).page_ins / 4, rel=0.01)
