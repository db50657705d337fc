# SPDX-License-Identifier: Apache-2.0
"""`make bench-apps`: its options, and the course of its invocations over made-up measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from isw_bench.apps import command, jobs, plan
from isw_bench.apps.course import Course, Wanted
from isw_bench.apps.jobs import AppJob, Place
from isw_bench.apps.ledger import Ledger
from isw_bench.apps.plan import Cell
from isw_bench.bench import Bench, Settings, SkipError
from isw_bench.scope import Scope

from infiniswap.errors import SystemCallError, UsageError
from infiniswap.units import MIB

Measured = Callable[[str, int], dict[str, Any]]

PEAK_BYTES = 1000 * MIB


def job(key: str) -> AppJob:
    def make(_: Bench, directory: Path, size: float) -> None:
        (directory / "made").write_text(f"{size:g}")

    sizes = {jobs.FULL: 3.0, jobs.QUICK: 2.0, jobs.TINY: 1.0}
    return AppJob(key, key, "", sizes, make, lambda _, __: [], key, "", ())


class Machine:
    """Gives made-up results, and remembers what was asked."""

    def __init__(self, measured: Measured) -> None:
        self.asked: list[tuple[str, str]] = []
        self.limits_mib: list[int] = []
        self._measured = measured

    def measure(
        self, bench: Bench, app: AppJob, place: Place, rival: str, timeout_s: float
    ) -> dict[str, Any]:
        assert (place.source / "made").read_text() == "1"
        self.asked.append((app.key, rival))
        self.limits_mib.append(bench.settings.swap_limit_bytes // MIB)
        return self._measured(rival, len(self.asked))


def good(rival: str, _: int) -> dict[str, Any]:
    return {
        "status": plan.OK,
        "elapsed_s": 5.0,
        "took_s": 10.0,
        "check": {"rows": 7},
        "memory": {"anon_bytes": PEAK_BYTES},
        "paged": {"in_bytes": 0, "out_bytes": 0, "pool_in_bytes": 0},
    }


def course(
    tmp_path: Path,
    measured: Measured = good,
    *,
    keys: tuple[str, ...] = ("a",),
    rounds: int = 1,
    budget_s: float = 1e9,
) -> tuple[Course, Machine]:
    machine = Machine(measured)
    wanted = Wanted(
        [job(key) for key in keys], [50, 25], [plan.DISK], jobs.TINY, rounds, budget_s, 60.0
    )
    bench = Bench(Settings(rounds, 0.0), Scope(tmp_path), tmp_path, tmp_path)
    ledger = Ledger(tmp_path / "cells.jsonl", {key: {"commit": "c0ffee"} for key in keys})
    made = Course(bench, wanted, tmp_path, ledger, ledger.load(), machine.measure)
    return made, machine


def test_limits_are_shares_of_the_peak_without_a_limit(tmp_path: Path) -> None:
    made, machine = course(tmp_path)
    made.run()
    assert machine.asked == [("a", plan.UNLIMITED), ("a", plan.DISK), ("a", plan.DISK)]
    assert machine.limits_mib == [0, 500, 250]


def test_a_second_invocation_measures_only_what_is_missing(tmp_path: Path) -> None:
    def stops(rival: str, count: int) -> dict[str, Any]:
        if count == 3:
            raise KeyboardInterrupt
        return good(rival, count)

    made, _ = course(tmp_path, stops, keys=("a", "b"))
    with pytest.raises(KeyboardInterrupt):
        made.run()
    made, machine = course(tmp_path, keys=("a", "b"))
    made.run()
    assert machine.asked == [("a", plan.DISK), ("b", plan.UNLIMITED)] + [("b", plan.DISK)] * 2
    assert machine.limits_mib[0] == 250


def test_rounds_end_when_the_next_would_not_fit(tmp_path: Path) -> None:
    made, machine = course(tmp_path, rounds=9, budget_s=100.0)
    made.run()
    assert len(machine.asked) == 3 * 3  # of 30 s each


def test_a_wrong_answer_is_kept_as_one(tmp_path: Path) -> None:
    def wrong(rival: str, count: int) -> dict[str, Any]:
        return good(rival, count) | ({"check": {"rows": 8}} if count == 2 else {})

    made, _ = course(tmp_path, wrong)
    made.run()
    kept = Ledger(tmp_path / "cells.jsonl", {"a": {"commit": "c0ffee"}}).load()
    assert kept[Cell("a", 50, plan.DISK, 1)]["status"] == plan.WRONG
    assert kept[Cell("a", 25, plan.DISK, 1)]["status"] == plan.OK


def test_a_job_that_failed_is_tried_again_by_the_next_invocation(tmp_path: Path) -> None:
    def fails(rival: str, count: int) -> dict[str, Any]:
        failed = {"status": plan.FAILED, "why": "no reason"}
        return good(rival, count) | (failed if count == 2 else {})

    made, _ = course(tmp_path, fails)
    made.run()
    made, machine = course(tmp_path)
    made.run()
    assert machine.asked == [("a", plan.DISK)]


def test_one_rival_that_cannot_be_had_does_not_stop_the_others(tmp_path: Path) -> None:
    def partly(rival: str, count: int) -> dict[str, Any]:
        if count == 2:
            raise SkipError("not here")
        if count == 3:
            raise SystemCallError("it cannot be set up")
        return good(rival, count)

    made, machine = course(tmp_path, partly, keys=("a", "b"))
    made.run()
    assert len(machine.asked) == 6
    assert made.failed  # by the error, not by what this host lacks
    assert {cell.job for cell in made.results} == {"a", "b"}


def test_without_a_run_without_a_limit_there_is_nothing_to_compare(tmp_path: Path) -> None:
    def killed(rival: str, count: int) -> dict[str, Any]:
        return good(rival, count) | {"status": plan.KILLED}

    made, machine = course(tmp_path, killed)
    made.run()
    assert machine.asked == [("a", plan.UNLIMITED)]


# --------------------------------------------------------------------------------- options


def test_the_whole_table_by_default() -> None:
    _, wanted = command.parse([])
    assert [app.key for app in wanted.jobs] == [
        key for key, app in jobs.JOBS.items() if not app.is_extra
    ]
    assert list(wanted.shares) == [50, 25]
    assert tuple(wanted.rivals) == plan.RIVALS
    assert wanted.size == jobs.FULL
    assert wanted.budget_s == 3 * 3600


def test_pages_that_are_not_sealed_are_measured_when_they_are_named() -> None:
    _, wanted = command.parse([])
    assert plan.OURS_PLAIN not in wanted.rivals
    _, wanted = command.parse(["--rival", plan.OURS_PLAIN, "--rival", plan.OURS])
    cells = plan.cells_of_round(["a"], [50], wanted.rivals, (), 1)
    assert [cell.rival for cell in cells] == [plan.UNLIMITED, plan.OURS, plan.OURS_PLAIN]


def test_quick_is_one_round_of_small_inputs_at_half() -> None:
    _, wanted = command.parse(["--quick", "sort"])
    assert [app.key for app in wanted.jobs] == ["sort"]
    assert (list(wanted.shares), wanted.rounds, wanted.size) == ([50], 1, jobs.QUICK)
    assert plan.OURS in wanted.rivals
    assert len(wanted.rivals) < len(plan.RIVALS)


@pytest.mark.parametrize(
    "argv",
    [["no-such-job"], ["--share", "0"], ["--share", "100"], ["--minutes", "0"], ["--rounds", "-1"]],
)
def test_what_cannot_work_is_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        command.parse(argv)
