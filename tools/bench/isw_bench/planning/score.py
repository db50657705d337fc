# SPDX-License-Identifier: Apache-2.0
"""`make bench-plan`: plans each job with an empty history, then runs it at other limits."""

from __future__ import annotations

import argparse
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infiniswap.demo.children import environment as quiet_libraries
from infiniswap.errors import UsageError
from infiniswap.system.memory import host_memory, machine_memory
from infiniswap.system.programs import infiniswap
from infiniswap.units import MIB, PAGE_BYTES, format_size
from isw_bench import cluster, machine
from isw_bench.apps.jobs import FULL, TINY
from isw_bench.bench import Bench, Settings, SkipError
from isw_bench.exits import exit_code
from isw_bench.planning import tables
from isw_bench.planning.jobs import REDIS, SCORED, ScoreJob
from isw_bench.scope import WORK_DIR, Scope
from isw_bench.suite import ROOT

_SHARES = (75, 60, 50)
_PAIRS = 5
"""Of runs without a limit and with the recommended one, by turns."""
_RUN_S = 1800.0
_SLAB_BYTES = 64 * MIB
_POOL_BYTES = 2048 * MIB
_LOCAL_BYTES_MIN = 16 * MIB
_TOUCHED_BYTES_MAX = 8192 * MIB
_STEP_BYTES = 256 * MIB


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench-plan BENCH_ARGS=...",
        description="What `infiniswap plan` predicts, beside separate runs of the same jobs.",
        allow_abbrev=False,
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(SCORED)} (all)")
    parser.add_argument("--size", choices=(FULL, TINY), default=FULL, help="of inputs (full)")
    output = ROOT / "build" / "bench-plan-results"
    parser.add_argument("--output", type=Path, default=output, help="directory (%(default)s)")
    parser.add_argument("--work", type=Path, default=WORK_DIR, help="disk directory")
    parser.add_argument("--no-install", action="store_true", help="install no missing programs")
    return parser


class _Scorer:
    """Runs commands of the product for one score.

    Args:
        bench: of the run.
        donors: their addresses.
    """

    def __init__(self, bench: Bench, donors: Sequence[str]) -> None:
        self._bench = bench
        self._donors = ",".join(donors)
        libraries = quiet_libraries({})
        self._changes = {
            **{name: libraries[name] for name in libraries if name.endswith(("THREADS", "POOL"))},
            **cluster.environment(bench),
            "INFINISWAP_DEVICE_BACKUP_DIR": str(bench.work / "backup"),
            "INFINISWAP_DEVICE_SLAB": format_size(_SLAB_BYTES),
        }

    def plan(self, command: Sequence[str]) -> Any:
        """A plan with an empty history."""
        argv = infiniswap("plan", "--forget", "--json", "--donors", self._donors, "--", *command)
        text = self._bench.run("plan", argv, _RUN_S, changes=self._changes)
        return json.loads(text[text.index('{\n  "command"') :])

    def run(self, command: Sequence[str], limit_bytes: int) -> Any:
        """The summary of a run."""
        path = self._bench.work / "summary.json"
        argv = infiniswap("run", "--quiet", "--local", format_size(limit_bytes))
        argv += ["--donors", self._donors, "--summary-json", str(path), "--", *command]
        if limit_bytes < _SLAB_BYTES:  # four times that may be less than the job needs
            argv[argv.index("--donors") : argv.index("--donors")] = ["--size", "512M"]
        self._bench.run("run", argv, _RUN_S, changes=self._changes)
        return json.loads(path.read_text())


def _touch_memory() -> None:
    """Uses memory that is free, and gives it back. The host of a virtual machine gives it memory
    when it is used for the first time, which takes as long again: the jobs that are scored first
    would wait for that, and those that come last would not."""
    touched_bytes = min(host_memory().available_bytes // 2, _TOUCHED_BYTES_MAX)
    parts = []
    for _ in range(touched_bytes // _STEP_BYTES):
        parts.append(mmap.mmap(-1, _STEP_BYTES))
        parts[-1][::PAGE_BYTES] = b"\1" * (_STEP_BYTES // PAGE_BYTES)
    for part in parts:
        part.close()


def _score(scorer: _Scorer, bench: Bench, job: ScoreJob, command: list[str]) -> dict[str, Any]:
    """A plan, and the runs that judge it."""
    bench.say(f"{job.key}: plan")
    plan = scorer.plan(command)
    if plan["recommended"] is None:
        raise UsageError(f"{job.key}: nothing is recommended: {'; '.join(plan['notes'])}")
    peak = plan["peak_bytes"]
    runs = []
    for share in _SHARES:
        limit_bytes = max(_LOCAL_BYTES_MIN, peak * share // 100 // PAGE_BYTES * PAGE_BYTES)
        bench.say(f"{job.key}: with {share} % of its memory")
        runs.append(scorer.run(command, limit_bytes))
    all_bytes = machine_memory().total_bytes // PAGE_BYTES * PAGE_BYTES
    whole, recommended = [], []
    for pair in range(1, _PAIRS + 1):
        bench.say(f"{job.key}: without a limit and with the recommended one, {pair} of {_PAIRS}")
        whole.append(scorer.run(command, all_bytes))
        recommended.append(scorer.run(command, plan["recommended"]["limit_bytes"]))
    return {
        "key": job.key,
        "title": job.title,
        "plan": plan,
        "runs": runs,
        "whole": whole,
        "recommended": recommended,
    }


def run(args: argparse.Namespace) -> int:
    """Scores; returns 1 when the score does not keep its bounds.

    Raises:
        UsageError: not root, no such job, or a plan that predicts nothing.
    """
    if os.geteuid() != 0:
        raise UsageError("bench-plan makes swap areas and memory cgroups, which needs root")
    for key in args.jobs:
        if key not in SCORED:
            raise UsageError(f"there is no job {key!r}: {', '.join(SCORED)}")
    if not args.no_install:
        machine.install_peers({REDIS: "redis-tools"})
    args.output.mkdir(parents=True, exist_ok=True)
    found: list[Mapping[str, Any]] = []
    with Scope(args.work) as scope:
        bench = Bench(Settings(1, 0.0), scope, ROOT, ROOT / "build" / "bench")
        if args.size == FULL:
            _touch_memory()
        with cluster.donors(bench, 2, _SLAB_BYTES, _POOL_BYTES) as donors:
            scorer = _Scorer(bench, list(donors))
            for job in SCORED.values():
                if args.jobs and job.key not in args.jobs:
                    continue
                try:
                    command = job.command(bench, args.output, job.sizes[args.size])
                except SkipError as error:
                    bench.say(f"{job.key}: left out: {error}")
                    continue
                found.append(_score(scorer, bench, job, command))
                _write(args.output, found)  # a later job may be interrupted
    if not found:
        return 1
    text, is_kept = tables.verdict(found)
    print(f"{tables.table(found)}\n\n{text}")
    return 0 if is_kept else 1


def _write(output: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Results and their picture."""
    about = {**machine.describe(ROOT), "load": machine.load(), "jobs": found}
    (output / "score.json").write_text(json.dumps(about, indent=1) + "\n")
    tables.draw(found, output / "score.png")


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: run(build_parser().parse_args(argv)))
