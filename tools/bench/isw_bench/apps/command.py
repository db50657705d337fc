# SPDX-License-Identifier: Apache-2.0
"""`make bench-apps`: its options, and the order of events."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.system.memory import memory_hierarchy
from isw_bench import machine
from isw_bench.apps import jobs, packages, plan, report, summary
from isw_bench.apps.course import Course, Wanted
from isw_bench.apps.jobs import JOBS, AppJob
from isw_bench.apps.ledger import Ledger
from isw_bench.apps.plan import Cell
from isw_bench.bench import Bench, Settings, build_programs
from isw_bench.children import output_of
from isw_bench.exits import exit_code
from isw_bench.scope import WORK_DIR, Scope
from isw_bench.suite import ROOT

_SHARES = (50, 25)
_ROUNDS_MAX = 9
_BUDGET_MINUTES = 180.0
_CELL_MINUTES = 10.0
_QUICK_RIVALS = (plan.OURS, plan.DISK)


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
    extra = ", ".join(job.key for job in JOBS.values() if job.is_extra)
    add("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)} (default: all but {extra})")
    add(
        "--quick", action="store_true", help="small inputs, half of the peak, one round, two rivals"
    )
    add("--share", type=int, action="append", metavar="PERCENT",
        help="of a job's peak that it may have in memory; may be given again (50, 25)")  # fmt: skip
    add("--rival", action="append", choices=plan.ORDER, metavar="NAME",
        help=f"may be given again: {', '.join(plan.ORDER)} "
        f"(default: all but '{plan.OURS_PLAIN}')")  # fmt: skip
    add("--size", choices=(jobs.FULL, jobs.QUICK, jobs.TINY), help="of inputs (full)")
    add("--rounds", type=int, help=f"at most ({_ROUNDS_MAX}), as many as the minutes allow")
    add("--minutes", type=float, default=_BUDGET_MINUTES, help="for all cells (%(default)s)")
    add("--cell-minutes", type=float, default=_CELL_MINUTES, metavar="MINUTES",
        help="after which a job is ended (%(default)s)")  # fmt: skip
    add("--report", action="store_true", help="measure nothing: write the tables of what is there")
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
    usual = [job.key for job in JOBS.values() if not job.is_extra]
    wanted = Wanted(
        jobs=[job for job in JOBS.values() if job.key in (args.jobs or usual)],
        shares=sorted(set(shares), reverse=True),
        rivals=args.rival or (_QUICK_RIVALS if args.quick else plan.RIVALS),
        size=args.size or (jobs.QUICK if args.quick else jobs.FULL),
        rounds=rounds,
        budget_s=args.minutes * 60,
        cell_s=args.cell_minutes * 60,
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


def run(args: argparse.Namespace, wanted: Wanted) -> int:
    """Measures what is missing and reports; returns the exit code.

    Raises:
        UsageError: not root.
    """
    if os.geteuid() != 0 and not args.report:
        raise UsageError("bench-apps makes swap areas and memory cgroups, which needs root")
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
        "libraries": _versions(name for job in wanted.jobs for name in job.modules),
        **machine.describe(ROOT),
    }
    failed = False
    results = ledger.load()
    begin_s = time.monotonic()
    try:
        if not args.report:
            failed = _measure(args, wanted, ledger, results)
    finally:
        about["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        about["minutes"] = round((time.monotonic() - begin_s) / 60, 1)
        sizes = [(job, job.sizes[wanted.size]) for job in wanted.jobs]
        report.write(results, sizes, about, args.output)
    wrong = summary.bad_answers(results)
    for each in wrong:
        print(f"bench: wrong answer: {each}", file=sys.stderr)
    return 1 if wrong or failed else 0


def _versions(modules: Iterable[str]) -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for name in sorted(set(modules)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _measure(
    args: argparse.Namespace, wanted: Wanted, ledger: Ledger, results: dict[Cell, dict[str, Any]]
) -> bool:
    """Adds the cells that are missing to `results`; whether something could not be set up."""
    if not args.no_install:
        for job in wanted.jobs:
            machine.install_peers(job.packages)
            for program, package in job.servers.items():
                packages.take(program, package, args.build)
    if any(job.needs_build for job in wanted.jobs):
        build_programs(ROOT, args.build)
    with Scope(args.work) as scope:
        scope.work.chmod(0o711)  # a database server runs as another user
        bench = Bench(Settings(wanted.rounds, 0.0), scope, ROOT, args.build.resolve())
        course = Course(bench, wanted, args.output, ledger, results)
        course.run()
    return course.failed


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: run(*parse(argv)))
