# SPDX-License-Identifier: Apache-2.0
"""Far memory beside no limit, a swap file on this machine's disk, and swap by Infiniswap."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from infiniswap.cli.run.far import LOCAL_BYTES_MIN
from infiniswap.system.files import SYS, try_read_text
from infiniswap.system.swap import active_areas
from infiniswap.system.userfault import far_refusal
from infiniswap.units import MIB, format_size_short
from isw_bench.apps import cell, course, inputs, plan, report
from isw_bench.apps.jobs import TINY, AppJob, Place
from isw_bench.apps.plan import Cell
from isw_bench.bench import Bench, SkipError, require_root
from isw_bench.far import rows
from isw_bench.far.rows import Line, Row
from isw_bench.results import Comparison, Figure, Samples
from isw_bench.stats import quantile

KEY = "far"
TITLE = "Far memory: jobs with a part of the memory they want"

Result = Mapping[str, Any]

_CELL_S: Final = 900.0
_OURS: Final = (plan.FAR, plan.FAR_LOSSY, plan.FAR_KILLED)
_NEVER_FAR: Final = 0.02
"""A row of which a larger share of the far bytes was handed back is no win."""
_WENT_FAR: Final = 0.5
"""A row of which a smaller share of the leaving bytes went far is no win, if many left: more than
_NEVER_FAR of the job's peak."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or far memory cannot be here.
    """
    require_root("a job with a limit")
    if (refusal := far_refusal()) is not None:
        raise SkipError(refusal)
    if areas := active_areas():
        raise SkipError(f"swap is active ({areas[0].path}), and would take the jobs' pages")
    measured = Rounds(bench, rows.chosen(bench.settings.far_rows))
    for number in bench.rounds("far"):
        measured.round(number)
    return Comparison(
        KEY,
        TITLE,
        measured.figures(),
        measured.samples().values,
        notes=[*_notes(), *measured.notes()],
        failed="; ".join(measured.failures),
    )


def _notes() -> list[str]:
    huge = try_read_text(SYS / "kernel/mm/transparent_hugepage/enabled") or "none"
    return [
        f"Donors on loopback, {len(os.sched_getaffinity(0))} processors, pages sealed, the backup "
        "and the swap file on this machine's disk, one job after the other. Results are compared "
        "with those without a limit.",
        f"No limit is the faster of plain and with huge pages (GLIBC_TUNABLES="
        f"glibc.malloc.hugetlb=1; transparent huge pages here: {huge.strip()}).",
    ]


class Rounds:
    """The rounds of the area.

    Args:
        bench: of the run.
        wanted: rows to measure.
        measure: runs a cell, as cell.measure does.

    Attributes:
        failures: what makes the run fail, one text each.
    """

    def __init__(
        self, bench: Bench, wanted: Sequence[Row], measure: course.Measure = cell.measure
    ) -> None:
        self._bench = bench
        self._rows = wanted
        self._run_cell = measure
        self._results: dict[Cell, Result] = {}
        self._left_out: dict[str, str] = {}
        self.failures: list[str] = []

    # ------------------------------------------------------------------------ measuring

    def round(self, number: int) -> None:
        """Measures each row once."""
        for row in self._rows:
            if row.job.key not in self._left_out:
                try:
                    self._measure(row, number)
                except SkipError as error:
                    self._left_out[row.job.key] = str(error)
                    self._bench.say(f"  left out: {error}")

    def _measure(self, row: Row, number: int) -> None:
        job = row.job
        if missing := job.missing(self._bench.build):
            raise SkipError(f"not installed (make bench-apps does it): {', '.join(missing)}")
        size = job.sizes[self._bench.settings.far_size]
        source = inputs.prepare(self._bench, self._bench.work, job, size)
        place = Place(source, self._bench.work / "job", size, self._bench.settings.far_size == TINY)
        base_cells = [Cell(job.key, plan.WHOLE, plan.UNLIMITED, number)]
        if row.needs_no_limit:
            base_cells.append(Cell(job.key, plan.WHOLE, plan.HUGE, number))
        elif number > 1:
            base_cells = []
        for each in base_cells:
            if each not in self._results:
                self._run(each, job, place)
        for rival in row.rivals:
            self._run(Cell(row.name, row.share, rival, number), job, place)

    def _run(self, each: Cell, job: AppJob, place: Place) -> None:
        self._bench.say(str(each))
        base = self._results.get(Cell(job.key, plan.WHOLE, plan.UNLIMITED, 1))
        if base is None:
            result = self._run_cell(self._bench, job, place, each.rival, _CELL_S)
            if result["status"] != plan.OK:
                raise SkipError(f"{job.key} did not work without a limit: {result.get('why', '')}")
        else:
            peak_bytes = base["memory"]["anon_bytes"]
            bench = course.limited(self._bench, peak_bytes, each.share, LOCAL_BYTES_MIN)
            result = course.compared(bench, job, place, each.rival, base, _CELL_S, self._run_cell)
        self._bench.say(f"  {report.short(result)}")
        if result.get("run", {}).get("far"):
            self._bench.say(f"  {went_far([result])}")
        if result["status"] in (plan.WRONG, plan.FAILED):
            self.failures.append(f"{each}: {result['status']} {result.get('why', '')}".strip())
        self._results[each] = result

    # ------------------------------------------------------------------------ reporting

    def _values(self, cells: Mapping[int, Cell]) -> dict[int, dict[str, float]]:
        """The values of each round that gave some."""
        return {
            number: values(self._results[each])
            for number, each in cells.items()
            if self._results[each]["status"] in (plan.OK, plan.TIMEOUT)
        }

    def _side(self, row: Row, rival: str) -> dict[int, dict[str, float]]:
        """Values by round."""
        name = row.job.key if rival in (plan.UNLIMITED, plan.HUGE) else row.name
        found = self._values(
            {each.round: each for each in self._results if (each.job, each.rival) == (name, rival)}
        )
        if rival == plan.FAR:
            swapped = self._side(row, plan.OURS) if plan.OURS in row.rivals else {}
            for number in found.keys() & swapped.keys():
                beyond = found[number]["peak_mib"] - swapped[number]["peak_mib"]
                found[number]["beyond_mib"] = max(0.0, beyond)
        return found

    def _no_limit(self, row: Row) -> tuple[str, dict[int, dict[str, float]]]:
        """The faster of both, by the median of its rounds."""
        sides = {name: self._side(row, name) for name in (plan.UNLIMITED, plan.HUGE)}
        times = {
            name: quantile([each["elapsed_s"] for each in side.values()], 0.5)
            for name, side in sides.items()
            if side
        }
        if not times:
            return plan.UNLIMITED, {}
        best = min(times, key=lambda name: times[name])
        return best, sides[best]

    def figures(self) -> list[Figure]:
        """The table."""
        found = []
        for row in self._rows:
            for line in row.lines:
                figure = self._figure(row, line)
                if figure is not None:
                    found.append(figure)
        return found

    def _figure(self, row: Row, line: Line) -> Figure | None:
        """None when no round has both sides."""
        if line.theirs == rows.NO_LIMIT:
            name, theirs = self._no_limit(row)
        else:
            name, theirs = line.theirs, self._side(row, line.theirs)
        ours, key, their_key = self._side(row, line.ours), line.key, line.their_key or line.key
        both = [
            number
            for number in sorted(ours.keys() & theirs.keys())
            if key in ours[number] and their_key in theirs[number]
        ]
        if not both:
            return None
        far = next((side for side in (line.ours, line.theirs) if side in _OURS), "")
        return Figure(
            f"{row.name}: {line.what}",
            line.unit,
            [ours[number][key] for number in both],
            [theirs[number][their_key] for number in both],
            line.their_name or name,
            better=line.better,
            target=line.target,
            our_name=line.ours,
            must=line.must,
            no_win=self._no_win(row, far) if far else "",
        )

    def _far_results(self, row: Row, rival: str) -> list[Result]:
        return [
            result
            for each, result in self._results.items()
            if (each.job, each.rival) == (row.name, rival) and result.get("run", {}).get("far")
        ]

    def _no_win(self, row: Row, rival: str) -> str:
        reasons = (no_win(result["run"]) for result in self._far_results(row, rival))
        return next(filter(None, reasons), "")

    def samples(self) -> Samples:
        """Every value of every round."""
        found = Samples()
        for each, result in self._results.items():
            if result["status"] in (plan.OK, plan.TIMEOUT):
                found.add(f"{each.job}: {each.rival}", **values(result))
        return found

    def notes(self) -> list[str]:
        """What of each row went far, and what did not work."""
        found = []
        for row in self._rows:
            for rival in _OURS:
                if results := self._far_results(row, rival):
                    found.append(f"{row.name}, {rival}, worst round: {went_far(results)}.")
        found += [f"{name} was left out: {why}." for name, why in self._left_out.items()]
        return found + [
            f"{each}: {result['status']} after {result.get('elapsed_s', 0.0):.0f} s."
            for each, result in self._results.items()
            if result["status"] != plan.OK
        ]


def values(result: Result) -> dict[str, float]:
    """The numbers of a cell."""
    busy = result["busy_s"]
    found = {
        "elapsed_s": float(result["elapsed_s"]),
        "own_cpu_s": busy.get("job", 0.0) + busy["device"],
        "device_cpu_s": busy["device"],
        "donors_cpu_s": busy["donors"],
        "kernel_cpu_s": sum(busy["kernel"].values()),
        "paged_in_mib": result["paged"]["in_bytes"] / MIB,
        "paged_out_mib": result["paged"]["out_bytes"] / MIB,
    }
    for name, value in result.items():
        if name.endswith(("_per_s", "_ms")):
            found[name] = float(value)
    for name in ("read", "write", "touch"):
        for part in ("p999", "max"):
            if name in result:
                found[f"{name}_{part}_us"] = float(result[name][part])
    waits_us = [value for name, value in found.items() if name.endswith("_max_us")]
    if waits_us:
        found["longest_ms"] = max(waits_us) / 1e3
    if told := result.get("run"):
        if waits_us and told["take_overs"]:
            found["paused_ms"] = found["longest_ms"]
        beside = (told["cost"] or {}).get("memory_bytes", 0)
        found["peak_mib"] = (told["local_peak_bytes"] + beside) / MIB
        found["local_mib"] = told["local_bytes"] / MIB
        found["waited_s"] = told["page_in_waited_s"]
        if far := told["far"]:
            found["far_share"] = far_share(told)
            found["far_out_mib"] = far["out_bytes"] / MIB
            found["far_in_mib"] = far["in_bytes"] / MIB
            found["far_swap_mib"] = far["swap_bytes"] / MIB
            found["handed_back_mib"] = sum(far["handed_back_bytes"].values()) / MIB
            found["fetch_wait_s"] = far["fetch_wait_s"]
            found["room_wait_s"] = far["room_wait_s"]
    return found


def far_share(told: Result) -> float:
    """The part of the bytes that left which went far; 1 when none left.

    Args:
        told: the summary of `infiniswap run`.
    """
    left_bytes = told["page_out_bytes"]
    return min(1.0, told["far"]["out_bytes"] / left_bytes) if left_bytes else 1.0


def no_win(told: Result) -> str:
    """Why a good figure of this run is none of far memory; "" when it is. Takes the summary of
    `infiniswap run`."""
    far = told["far"]
    back = far["handed_back_bytes"]
    if problem := far["unfit"] or far["problem"]:
        return str(problem)
    if sum(back.values()) > _NEVER_FAR * max(far["out_bytes"], told["anon_peak_bytes"]):
        return f"handed back {format_size_short(sum(back.values()))} ({', '.join(sorted(back))})"
    many_left = told["page_out_bytes"] > _NEVER_FAR * told["anon_peak_bytes"]
    if many_left and (share := far_share(told)) < _WENT_FAR:
        return f"only {share:.0%} went far"
    return ""


def went_far(results: Sequence[Result]) -> str:
    """What left by which way, of the round in which least went far."""
    told = min((result["run"] for result in results), key=far_share)
    far = told["far"]
    back = sum(far["handed_back_bytes"].values())
    reasons = f" ({', '.join(sorted(far['handed_back_bytes']))})" if back else ""
    text = (
        f"{far_share(told):.1%} of the bytes that left went far "
        f"({format_size_short(far['out_bytes'])} out, {format_size_short(far['in_bytes'])} in), "
        f"{format_size_short(far['swap_bytes'])} by swap, {format_size_short(back)} handed back"
        f"{reasons}"
    )
    reason = no_win(told)
    return f"{text}; NO WIN: {reason}" if reason else text
