# SPDX-License-Identifier: Apache-2.0
"""`make bench-apps`: its options, and the order of events."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infiniswap.errors import ConflictError, InfiniswapError, UsageError
from infiniswap.system.interrupts import Interrupted
from infiniswap.system.memory import memory_hierarchy
from infiniswap.system.swap import active_areas
from infiniswap.units import MIB, round_up
from isw_bench import machine
from isw_bench.apps import cell, inputs, jobs, packages, plan, report, rivals, summary
from isw_bench.apps.jobs import JOBS, AppJob, Place
from isw_bench.apps.ledger import Ledger
from isw_bench.apps.plan import Cell
from isw_bench.apps.turns import Turns
from isw_bench.bench import Bench, Settings, SkipError, build_programs, require_root
from isw_bench.children import output_of
from isw_bench.scope import WORK_DIR, Scope
from isw_bench.suite import ROOT, interrupt_behind

_SHARES = (50, 25)
_ROUNDS_MAX = 9
_BUDGET_MINUTES = 180.0
_CELL_MINUTES = 10.0
_QUICK_RIVALS = (plan.OURS, plan.DISK)
_LIMIT_BYTES_MIN = 32 * MIB
_SLOWEST = 40.0
"""Times as long as without a limit: a job that takes longer is ended."""
_SLACK_S = 60.0


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
        lock: a file to hold the lock of during each measurement, or None.
    """

    jobs: Sequence[AppJob]
    shares: Sequence[int]
    rivals: Sequence[str]
    size: str
    rounds: int
    budget_s: float
    cell_s: float
    lock: Path | None


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench-apps BENCH_ARGS=...",
        description="Other people's benchmarks with a part of the memory they want: Infiniswap "
        "beside disks, zram, zswap and the applications' own spilling. Finished cells are kept: "
        "the same command goes on where it was stopped.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)} (default: all)")
    add(
        "--quick", action="store_true", help="small inputs, half of the peak, one round, two rivals"
    )
    add("--share", type=int, action="append", metavar="PERCENT",
        help="of a job's peak that it may have in memory; may be given again (50, 25)")  # fmt: skip
    add("--rival", action="append", choices=plan.RIVALS, metavar="NAME",
        help=f"may be given again: {', '.join(plan.RIVALS)} (default: all)")  # fmt: skip
    add("--size", choices=(jobs.FULL, jobs.QUICK, jobs.TINY), help="of inputs (full)")
    add("--rounds", type=int, help=f"at most ({_ROUNDS_MAX}), as many as the minutes allow")
    add("--minutes", type=float, default=_BUDGET_MINUTES, help="for all cells (%(default)s)")
    add("--cell-minutes", type=float, default=_CELL_MINUTES, metavar="MINUTES",
        help="after which a job is ended (%(default)s)")  # fmt: skip
    add("--lock", type=Path, metavar="FILE",
        help="hold this file's lock (flock) while measuring, up to three minutes at a time: for a "
        "machine where others measure, too")  # fmt: skip
    output = ROOT / "build" / "bench-apps-results"
    add("--output", type=Path, default=output, help="directory (%(default)s)")
    add("--build", type=Path, default=ROOT / "build" / "bench", help="where to build programs")
    add("--work", type=Path, default=WORK_DIR, help="disk directory for swap areas")
    add("--no-install", action="store_true", help="do not install missing programs")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Wanted]:
    """What was asked for, checked.

    Raises:
        UsageError: it cannot work.
    """
    args = build_parser().parse_args(argv)
    for name in args.jobs:
        if name not in JOBS:
            raise UsageError(f"there is no job {name!r}: {', '.join(JOBS)}")
    shares = args.share or (_SHARES[:1] if args.quick else _SHARES)
    if not all(0 < share < plan.WHOLE for share in shares):
        raise UsageError("--share must be between 0 and 100")
    rounds = args.rounds or (1 if args.quick else _ROUNDS_MAX)
    if rounds < 1 or args.minutes <= 0 or args.cell_minutes <= 0:
        raise UsageError("--rounds, --minutes and --cell-minutes must be positive")
    wanted = Wanted(
        jobs=[job for job in JOBS.values() if not args.jobs or job.key in args.jobs],
        shares=sorted(set(shares), reverse=True),
        rivals=args.rival or (_QUICK_RIVALS if args.quick else plan.RIVALS),
        size=args.size or (jobs.QUICK if args.quick else jobs.FULL),
        rounds=rounds,
        budget_s=args.minutes * 60,
        cell_s=args.cell_minutes * 60,
        lock=args.lock,
    )
    return args, wanted


def product_commit() -> str:
    """The last commit that changed the product, with "+" for changes since."""
    git = ["git", "-C", str(ROOT)]
    paths = ["--", "infiniswap", "csrc"]
    try:
        commit = output_of([*git, "log", "-1", "--format=%h", *paths], "", 20.0).strip()
        changed = output_of([*git, "status", "--porcelain", *paths], "", 20.0).strip()
    except InfiniswapError:
        return "unknown"
    return commit + "+" * bool(changed)


def identity(job: AppJob, size: str, commit: str) -> dict[str, Any]:
    """What makes two results of a job comparable."""
    return {
        "commit": commit,
        "size": job.sizes[size],
        "programs": job.digest(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
    }


class Course:
    """One invocation: measures the cells that are missing.

    Args:
        bench: of the run.
        wanted: what was asked for.
        output: directory of results and inputs.
        ledger: there.
        turns: with others who measure.
    """

    def __init__(
        self, bench: Bench, wanted: Wanted, output: Path, ledger: Ledger, turns: Turns
    ) -> None:
        self._bench = bench
        self._wanted = wanted
        self._output = output
        self._ledger = ledger
        self._turns = turns
        self._left_out: dict[tuple[str, str], str] = {}
        self.results = ledger.load()
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
        done = sum(other in self.results for other in cells)
        minutes = plan.left_s(cells, took_s) / 60
        self._bench.say(
            f"{done} of {len(cells)} in this round, about {minutes:.0f} minutes left of it: {each}"
        )

    def _keep(self, each: Cell) -> None:
        reason = self._left_out.get((each.job, each.rival))
        if reason is None:
            try:
                self._turns.begin(plan.estimate_s(each, self._took_s()))
                result = self._measure(each)
                self._ledger.append(each, result)
                self.results[each] = result
                self._bench.say(f"  {report.short(result)}")
                return
            except SkipError as error:
                reason = str(error)
                self._left_out[each.job, each.rival] = reason
            except (InfiniswapError, OSError) as error:  # the other cells are measured
                if isinstance(error, InfiniswapError) and (signal := interrupt_behind(error)):
                    raise signal from error
                self.failed = True
                reason = f"it could not be set up: {error}"
        self._bench.say(f"  left out: {reason}")

    def _measure(self, each: Cell) -> dict[str, Any]:
        job = JOBS[each.job]
        size = job.sizes[self._wanted.size]
        if missing := job.missing(self._bench.build):
            raise SkipError(f"not installed: {', '.join(missing)}")
        source = inputs.prepare(self._bench, self._output, job, size)
        place = Place(source, self._bench.work / "job", size, self._wanted.size == jobs.TINY)
        base = self._unlimited(each)
        timeout_s = self._wanted.cell_s
        bench = self._bench
        if base is not None:
            peak_bytes = peak_of(self.results, each.job)
            limit_bytes = round_up(int(peak_bytes * each.share / plan.WHOLE), MIB)
            bench = rivals.sized(bench, peak_bytes, max(limit_bytes, _LIMIT_BYTES_MIN))
            timeout_s = min(timeout_s, _SLOWEST * base["elapsed_s"] + _SLACK_S)
        elif each.rival != plan.UNLIMITED:
            raise SkipError("the job did not work without a limit")
        if areas := active_areas():
            raise ConflictError(
                f"swap is active ({areas[0].path}), and would take the rivals' pages",
                mend="Switch it off while this runs: swapoff -a.",
            )
        result = cell.measure(bench, job, place, each.rival, timeout_s)
        answer = result.get("check")
        if base is not None and answer and not cell.agrees(base["check"], answer):
            result["status"] = cell.WRONG
        return result

    def _unlimited(self, each: Cell) -> dict[str, Any] | None:
        """The first good result of the job without a limit."""
        if each.rival == plan.UNLIMITED:
            return None
        found = self.results.get(Cell(each.job, plan.WHOLE, plan.UNLIMITED, each.round))
        return found if found and found["status"] == cell.OK else None


def peak_of(results: Mapping[Cell, Mapping[str, Any]], job: str) -> int:
    """The job's peak: of its first run without a limit, so that all rounds have the same limit."""
    peaks = {
        each.round: int(result["memory"]["anon_bytes"])
        for each, result in results.items()
        if each.job == job and each.rival == plan.UNLIMITED and result["status"] == cell.OK
    }
    return peaks[min(peaks)]


def run(args: argparse.Namespace, wanted: Wanted) -> int:
    """Measures what is missing and reports; returns the exit code."""
    try:
        require_root("bench-apps")
    except SkipError as error:
        raise UsageError(f"{error}, for swap areas and memory cgroups") from None
    if not args.no_install:
        machine.install_peers({k: v for job in wanted.jobs for k, v in job.packages.items()})
        for program, package in {
            k: v for job in wanted.jobs for k, v in job.servers.items()
        }.items():
            packages.take(program, package, args.build)
    if any(job.needs_build for job in wanted.jobs):
        build_programs(ROOT, args.build)
    args.output.mkdir(parents=True, exist_ok=True)
    commit = product_commit()
    identities = {job.key: identity(job, wanted.size, commit) for job in wanted.jobs}
    ledger = Ledger(args.output / "cells.jsonl", identities)
    about: dict[str, Any] = {
        "ended": "",
        "command": shlex.join(["make", "bench-apps", f"BENCH_ARGS={shlex.join(sys.argv[2:])}"]),
        "commit": commit,
        "size": wanted.size,
        "cgroup_version": memory_hierarchy().version,
        **machine.describe(ROOT),
    }
    begin_s = time.monotonic()
    with Scope(args.work) as scope, Turns(wanted.lock) as turns:
        scope.work.chmod(0o711)  # a database server runs as another user
        bench = Bench(Settings(wanted.rounds, 0.0), scope, ROOT, args.build.resolve())
        course = Course(bench, wanted, args.output, ledger, turns)
        try:
            course.run()
        finally:
            about["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
            about["minutes"] = round((time.monotonic() - begin_s) / 60, 1)
            sizes = [(job, job.sizes[wanted.size]) for job in wanted.jobs]
            report.write(course.results, sizes, about, args.output)
    wrong = summary.bad_answers(course.results)
    for each in wrong:
        print(f"bench: wrong answer: {each}", file=sys.stderr)
    return 1 if wrong or course.failed else 0


def main(argv: Sequence[str]) -> int:
    """The command line; what users may do wrong, and Ctrl-C, become a line and an exit code."""
    try:
        return run(*parse(argv))
    except InfiniswapError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as signal:
        print("bench: interrupted", file=sys.stderr)
        return int(signal.code or 0)
