# SPDX-License-Identifier: Apache-2.0
"""The area `far` of `make bench` over made-up measurements: its rows, its table, what is no win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isw_bench import results
from isw_bench.apps import plan
from isw_bench.apps.jobs import TINY, AppJob, Place
from isw_bench.bench import Bench, Settings
from isw_bench.far import area, rows
from isw_bench.far.area import Rounds
from isw_bench.far.rows import Row
from isw_bench.peers import SUITE
from isw_bench.results import Figure
from isw_bench.scope import Scope
from isw_bench.suite import parse

from infiniswap.errors import UsageError
from infiniswap.units import MIB

PEAK_BYTES = 1000 * MIB
OUT_BYTES = 2000 * MIB


def summary(**far: Any) -> dict[str, Any]:
    """A summary as `infiniswap run` writes it."""
    return {
        "local_bytes": 500 * MIB,
        "local_peak_bytes": 500 * MIB,
        "anon_peak_bytes": PEAK_BYTES,
        "page_out_bytes": OUT_BYTES,
        "page_in_waited_s": 0.5,
        "take_overs": 0,
        "cost": {"memory_bytes": 200 * MIB},
        "far": {
            "unfit": "",
            "problem": "",
            "out_bytes": OUT_BYTES,
            "in_bytes": OUT_BYTES,
            "swap_bytes": 0,
            "handed_back_bytes": {},
            "fetch_wait_s": 0.1,
            "room_wait_s": 0.0,
            **far,
        },
    }


Measured = Callable[[str], dict[str, Any]]


def good(rival: str) -> dict[str, Any]:
    """Far memory takes 6 s, swap by Infiniswap 10, the swap file 15, no limit 5 or, with huge
    pages, 4."""
    seconds = {plan.UNLIMITED: 5.0, plan.HUGE: 4.0, plan.OURS: 10.0, plan.DISK: 15.0}
    found: dict[str, Any] = {
        "status": plan.OK,
        "elapsed_s": seconds.get(rival, 6.0),
        "check": {"rows": 7},
        "memory": {"anon_bytes": PEAK_BYTES},
        "paged": {"in_bytes": 0, "out_bytes": 0, "pool_in_bytes": 0},
        "busy_s": {"job": 5.0, "device": 1.0, "donors": 0.5, "kernel": {"loop": 0.25}},
    }
    if rival in (plan.FAR, plan.FAR_LOSSY):
        found["run"] = summary()
    elif rival == plan.OURS:
        found["run"] = {**summary(), "far": None, "cost": {"memory_bytes": 180 * MIB}}
    return found


def row(name: str) -> Row:
    """The row with a job that needs nothing."""
    (found,) = rows.chosen([name])

    def make(_: Bench, __: Path, ___: float) -> None:
        """No input."""

    return replace(found, job=replace(found.job, make=make, modules=(), needs_build=False))


class Measuring(Rounds):
    """The rounds, which remember what was asked for: rival and limit in MiB."""

    asked: list[tuple[str, int]]


def rounds(tmp_path: Path, *wanted: Row, measured: Measured = good, count: int = 1) -> Measuring:
    asked: list[tuple[str, int]] = []

    def measure(
        bench: Bench, job: AppJob, place: Place, rival: str, timeout_s: float
    ) -> dict[str, Any]:
        asked.append((rival, bench.settings.swap_limit_bytes // MIB))
        return measured(rival)

    settings = Settings(count, 1.0, far_size=TINY)
    bench = Bench(settings, Scope(tmp_path), tmp_path, tmp_path)
    (tmp_path / bench.work.name).mkdir()
    made = Measuring(bench, wanted, measure)
    made.asked = asked
    for number in range(1, count + 1):
        made.round(number)
    return made


def figure(made: Rounds, what: str) -> Figure:
    """The only one that compares this."""
    (found,) = (each for each in made.figures() if each.name.partition(": ")[2] == what)
    return found


def test_a_name_chooses_a_row_or_all_that_begin_with_it() -> None:
    names = [each.name for each in rows.chosen(["pandas"])]
    assert names == ["pandas-half", "pandas-quarter"]
    assert [each.name for each in rows.chosen(["gather", "random"])] == ["gather", "random"]
    assert rows.chosen([]) == list(rows.ROWS)


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--rows", "pandas,none"], "no row 'none'"), (["--size", "huge"], "full, quick, tiny")],
)
def test_a_row_or_size_that_is_not_there_is_refused(options: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(SUITE, ["far", *options])


def test_a_row_runs_with_every_rival_and_its_share_of_the_peak(tmp_path: Path) -> None:
    made = rounds(tmp_path, row("pandas-half"), row("pandas-quarter"))
    limits = {limit for rival, limit in made.asked if rival == plan.FAR}
    assert limits == {500, 250}
    rivals = [rival for rival, _ in made.asked]
    assert rivals == [plan.UNLIMITED, plan.HUGE, *rows.LOSSY, *rows.LOSSY]


def test_a_job_that_is_not_compared_with_no_limit_runs_without_one_once(tmp_path: Path) -> None:
    made = rounds(tmp_path, row("in-order"), count=2)
    rivals = [rival for rival, _ in made.asked]
    assert rivals == [plan.UNLIMITED, *rows.LOSSY, *rows.LOSSY]


def test_no_limit_is_the_faster_of_plain_and_with_huge_pages(tmp_path: Path) -> None:
    slower = figure(rounds(tmp_path, row("pandas-half"), count=3), f"time with {plan.FAR}")
    assert (slower.their_name, slower.theirs) == (plan.HUGE, [4.0] * 3)
    assert (slower.ratio.median, slower.verdict) == (1.5, "must")


def test_the_swap_files_time_is_a_multiple_of_far_memorys(tmp_path: Path) -> None:
    faster = figure(rounds(tmp_path, row("pandas-half")), "time of the swap file / of far memory")
    assert (faster.ratio.median, faster.verdict) == (2.5, "pass")


def test_memory_beside_swaps_counts_as_a_share_of_the_limit(tmp_path: Path) -> None:
    beyond = figure(
        rounds(tmp_path, row("pandas-half")), "peak of job, device and rings beyond that with swap"
    )
    assert (beyond.ours, beyond.theirs, beyond.verdict) == ([20.0], [500.0], "pass")


@pytest.mark.parametrize(
    ("far", "why"),
    [
        ({"handed_back_bytes": {"fork": 41 * MIB}}, "handed back 41.0 MiB (fork)"),
        ({"handed_back_bytes": {"fork": 40 * MIB}}, ""),
        ({"unfit": "x cannot load the agent"}, "x cannot load the agent"),
        ({"problem": "no room for it"}, "no room for it"),
        ({"out_bytes": OUT_BYTES * 49 // 100}, "only 49% went far"),
    ],
)
def test_what_did_not_go_far_is_no_win(tmp_path: Path, far: dict[str, Any], why: str) -> None:
    def measured(rival: str) -> dict[str, Any]:
        return good(rival) | ({"run": summary(**far)} if rival == plan.FAR else {})

    made = rounds(tmp_path, row("pandas-half"), measured=measured)
    faster = figure(made, "time of the swap file / of far memory")
    assert (faster.no_win, faster.verdict) == (why, "no win" if why else "pass")
    assert any(f"NO WIN: {why}" in note for note in made.notes()) == bool(why)
    assert figure(made, f"time with {plan.FAR_LOSSY}").no_win == ""


@pytest.mark.parametrize(("left_bytes", "why"), [(19 * MIB, ""), (21 * MIB, "only 0% went far")])
def test_little_that_left_by_swap_does_not_spoil_a_win(left_bytes: int, why: str) -> None:
    told = summary(out_bytes=0) | {"page_out_bytes": left_bytes}
    assert area.no_win(told) == why


def test_the_share_that_went_far_is_that_of_the_worst_round(tmp_path: Path) -> None:
    shares = iter([OUT_BYTES * 9 // 10, OUT_BYTES])

    def measured(rival: str) -> dict[str, Any]:
        changes = {"run": summary(out_bytes=next(shares))} if rival == plan.FAR else {}
        return good(rival) | changes

    made = rounds(tmp_path, row("numpy-half"), measured=measured, count=2)
    (note,) = made.notes()
    assert note.startswith("numpy-half, far memory, worst round: 90.0% of the bytes that left ")
    assert made.samples().of("numpy-half: far memory", "far_share") == [0.9, 1.0]


def test_another_answer_than_without_a_limit_fails_the_run(tmp_path: Path) -> None:
    def measured(rival: str) -> dict[str, Any]:
        return good(rival) | ({"check": {"rows": 8}} if rival == plan.FAR else {})

    made = rounds(tmp_path, row("numpy-half"), measured=measured)
    (failure,) = made.failures
    assert failure == "numpy-half, far memory, 50 %, round 1: wrong answer"
    assert not [each for each in made.figures() if plan.FAR in (each.our_name, each.their_name)]


def test_a_rival_that_is_killed_gives_no_figures_and_is_told(tmp_path: Path) -> None:
    def measured(rival: str) -> dict[str, Any]:
        return good(rival) | ({"status": plan.KILLED} if rival == plan.DISK else {})

    made = rounds(tmp_path, row("numpy-half"), measured=measured)
    assert made.failures == []
    assert not [each for each in made.figures() if plan.DISK in (each.our_name, each.their_name)]
    assert any("killed for lack of memory" in note for note in made.notes())


def test_a_job_that_fails_without_a_limit_leaves_out_its_rows_alone(tmp_path: Path) -> None:
    failed = iter([plan.FAILED])

    def measured(rival: str) -> dict[str, Any]:
        return good(rival) | {"status": next(failed, plan.OK)}

    made = rounds(tmp_path, row("numpy-half"), row("gather"), measured=measured)
    assert {each.name.partition(":")[0] for each in made.figures()} == {"gather"}
    assert any(note.startswith("numpy was left out: ") for note in made.notes())


def test_waits_and_rates_of_a_job_are_values_of_its_row() -> None:
    told = {"read_per_s": 900.0, "spawn_ms": 2.0, "read": {"p999": 50.0, "max": 70.0}}
    found = area.values(good(plan.FAR) | told)
    assert (found["read_per_s"], found["spawn_ms"]) == (900.0, 2.0)
    assert (found["read_p999_us"], found["read_max_us"]) == (50.0, 70.0)
    assert found["own_cpu_s"] == 6.0
    assert found["peak_mib"] == 700.0


@pytest.mark.parametrize("take_overs", [0, 1])
def test_a_wait_counts_as_a_pause_only_after_a_take_over(tmp_path: Path, take_overs: int) -> None:
    def measured(rival: str) -> dict[str, Any]:
        longest_us = 900.0 if rival == plan.FAR_KILLED else 90.0
        waits = {"read": {"p999": 5.0, "max": longest_us}, "write": {"p999": 5.0, "max": 7.0}}
        return good(rival) | waits | {"run": {**summary(), "take_overs": take_overs}}

    found = rounds(tmp_path, row("take-over"), measured=measured).figures()
    assert [(each.ours, each.theirs) for each in found] == [([0.9], [0.09])] * take_overs


def test_every_line_of_every_row_names_rivals_that_run() -> None:
    for each in rows.ROWS:
        rivals = {*each.rivals, *([rows.NO_LIMIT] if each.needs_no_limit else [])}
        assert {side for line in each.lines for side in (line.ours, line.theirs)} <= rivals


@pytest.mark.parametrize(
    ("ours", "no_win", "verdict"),
    [
        (1.4, "", "pass"),
        (1.6, "", "must"),
        (2.1, "", "miss"),
        (1.4, "handed back", "no win"),
        (2.1, "handed back", "miss"),
    ],
)
def test_a_verdict_has_a_target_a_must_and_what_is_no_win(
    ours: float, no_win: str, verdict: str
) -> None:
    made = Figure(
        "x",
        "s",
        [ours],
        [1.0],
        "no limit",
        target=results.at_most(1.5),
        must=results.at_most(2.0),
        no_win=no_win,
    )
    assert made.verdict == verdict
    assert verdict in results.VERDICTS
    assert results.cells(made)[-2:] == (
        "≤ 1.5 (must: ≤ 2)",
        "no win: handed back" if verdict == "no win" else verdict,
    )
