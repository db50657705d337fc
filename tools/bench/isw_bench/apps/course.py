# SPDX-License-Identifier: Apache-2.0
"""The course of one invocation: round by round, the cells that were not measured before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infiniswap.errors import InfiniswapError
from infiniswap.units import MIB, round_up
from isw_bench.apps import cell, inputs, jobs, plan, report, rivals
from isw_bench.apps.jobs import AppJob, Place
from isw_bench.apps.ledger import Ledger
from isw_bench.apps.plan import Cell
from isw_bench.bench import Bench, SkipError
from isw_bench.suite import interrupt_behind

_LIMIT_BYTES_MIN = 32 * MIB
_SLOWEST = 40.0
"""Times as long as without a limit: a job that takes longer is ended."""
_SLACK_S = 60.0

Measure = Callable[[Bench, AppJob, Place, str, float], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for.

    Attributes:
        jobs: in their order.
        shares: percent of the peak.
        rivals: apart from none.
        size: of jobs.FULL, QUICK, TINY.
        rounds: at most.
        budget_s: for all cells together.
        cell_s: for one.
    """

    jobs: Sequence[AppJob]
    shares: Sequence[int]
    rivals: Sequence[str]
    size: str
    rounds: int
    budget_s: float
    cell_s: float


class Course:
    """One invocation: measures the cells that are missing.

    Args:
        bench: of the run.
        wanted: what was asked for.
        output: directory of results and inputs.
        ledger: there.
        results: of finished cells; those of this invocation are added.
        measure: runs a cell, as cell.measure does.
    """

    def __init__(
        self,
        bench: Bench,
        wanted: Wanted,
        output: Path,
        ledger: Ledger,
        results: dict[Cell, dict[str, Any]],
        measure: Measure = cell.measure,
    ) -> None:
        self._bench = bench
        self._wanted = wanted
        self._output = output
        self._ledger = ledger
        self._run_cell = measure
        self._jobs = {job.key: job for job in wanted.jobs}
        self._left_out: dict[tuple[str, int, str], str] = {}
        self.results = results
        self.failed = False

    def run(self) -> None:
        """Round by round, as long as the budget allows."""
        for number in range(1, self._wanted.rounds + 1):
            cells = self._cells(number)
            enough = plan.fits_budget(cells, self._took_s(), self._wanted.budget_s)
            if number > 1 and not enough:
                self._bench.say(f"no time for round {number}")
                return
            for each in cells:
                if each not in self.results:
                    self._say(each)
                    self._keep(each)

    def _cells(self, number: int) -> list[Cell]:
        spilling = {job.key for job in self._wanted.jobs if job.spill is not None}
        names = [job.key for job in self._wanted.jobs]
        return plan.cells_of_round(
            names, self._wanted.shares, self._wanted.rivals, spilling, number
        )

    def _took_s(self) -> dict[Cell, float]:
        return {each: result.get("took_s", 0.0) for each, result in self.results.items()}

    def _say(self, each: Cell) -> None:
        cells, took_s = self._cells(each.round), self._took_s()
        cells = [x for x in cells if (x.job, x.share, x.rival) not in self._left_out]
        done = sum(other in self.results for other in cells)
        minutes = plan.left_s(cells, took_s) / 60
        self._bench.say(
            f"{done} of {len(cells)} in this round, about {minutes:.0f} minutes left of it: {each}"
        )

    def _keep(self, each: Cell) -> None:
        reason = self._left_out.get((each.job, each.share, each.rival))
        if reason is None:
            try:
                source = self._source(each)
                result = self._measure(each, source)
                if result["status"] != plan.FAILED:  # the next invocation tries again
                    self._ledger.append(each, result)
                self.results[each] = result
                self._bench.say(f"  {report.short(result)}")
                return
            except SkipError as error:
                reason = str(error)
                self._left_out[each.job, each.share, each.rival] = reason
            except (InfiniswapError, OSError) as error:  # the other cells are measured
                if isinstance(error, InfiniswapError) and (signal := interrupt_behind(error)):
                    raise signal from error
                self.failed = True
                reason = f"it could not be set up: {error}"
        self._bench.say(f"  left out: {reason}")

    def _source(self, each: Cell) -> Path:
        """The input of its job."""
        job = self._jobs[each.job]
        if missing := job.missing(self._bench.build):
            raise SkipError(f"not installed: {', '.join(missing)}")
        return inputs.prepare(self._bench, self._output, job, job.sizes[self._wanted.size])

    def _measure(self, each: Cell, source: Path) -> dict[str, Any]:
        job = self._jobs[each.job]
        size = job.sizes[self._wanted.size]
        place = Place(source, self._bench.work / "job", size, self._wanted.size == jobs.TINY)
        base = self._unlimited(each)
        if base is None:
            if each.rival != plan.UNLIMITED:
                raise SkipError("the job did not work without a limit")
            return self._run_cell(self._bench, job, place, each.rival, self._wanted.cell_s)
        peak_bytes = peak_of(self.results, each.job)
        bench = limited(self._bench, peak_bytes, each.share)
        return compared(bench, job, place, each.rival, base, self._wanted.cell_s, self._run_cell)

    def _unlimited(self, each: Cell) -> dict[str, Any] | None:
        """The first good result of the job without a limit."""
        if each.rival == plan.UNLIMITED:
            return None
        found = self.results.get(Cell(each.job, plan.WHOLE, plan.UNLIMITED, each.round))
        return found if found and found["status"] == plan.OK else None


def limited(
    bench: Bench, peak_bytes: int, share: int, least_bytes: int = _LIMIT_BYTES_MIN
) -> Bench:
    """The same for a job of that peak, of which it may have so many percent in memory, and not less
    than `least_bytes`."""
    limit_bytes = round_up(int(peak_bytes * share / plan.WHOLE), MIB)
    return rivals.sized(bench, peak_bytes, max(limit_bytes, least_bytes))


def compared(
    bench: Bench,
    job: AppJob,
    place: Place,
    rival: str,
    base: Mapping[str, Any],
    cell_s: float,
    measure: Measure = cell.measure,
) -> dict[str, Any]:
    """Measures a cell and compares its answer with that of the job without a limit.

    Args:
        bench: with the limit.
        job, place, rival: of the cell.
        base: result of the job without a limit.
        cell_s: after so long the job is ended, or after a multiple of the base's time.
        measure: runs a cell, as cell.measure does.
    """
    timeout_s = min(cell_s, _SLOWEST * base["elapsed_s"] + _SLACK_S)
    result = measure(bench, job, place, rival, timeout_s)
    answer = result.get("check")
    if answer and not cell.agrees(base["check"], answer):
        result["status"] = plan.WRONG
    return result


def peak_of(results: Mapping[Cell, Mapping[str, Any]], job: str) -> int:
    """The job's peak: of its first run without a limit, so that all rounds have the same limit."""
    peaks = {
        each.round: int(result["memory"]["anon_bytes"])
        for each, result in results.items()
        if each.job == job and each.rival == plan.UNLIMITED and result["status"] == plan.OK
    }
    return peaks[min(peaks)]
