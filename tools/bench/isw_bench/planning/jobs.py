# SPDX-License-Identifier: Apache-2.0
"""The five jobs of the score, each in a size for the score and one for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infiniswap.demo import legs
from isw_bench.apps import inputs, packages
from isw_bench.apps.jobs import FULL, JOBS, TINY, AppJob, Place
from isw_bench.bench import Bench, SkipError

PROGRAMS = Path(__file__).parent / "programs"
REDIS = "redis-check-rdb"


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """One job.

    Attributes:
        key: on the command line.
        title: in tables.
        sizes: by FULL and TINY, as text.
        command: from the directory of results, and a size.
    """

    key: str
    title: str
    sizes: Mapping[str, float]
    command: Callable[[Bench, Path, float], list[str]]


def _python(program: Path, *args: object) -> list[str]:
    return [sys.executable, "-I", str(program), *map(str, args)]


def _of_apps(job: AppJob) -> Callable[[Bench, Path, float], list[str]]:
    """A job of `make bench-apps`, with its input."""

    def command(bench: Bench, output: Path, size: float) -> list[str]:
        if missing := job.missing(bench.build):
            raise SkipError(f"not installed: {', '.join(missing)}")
        source = inputs.prepare(bench, output, job, size)
        return job.command(bench, Place(source, bench.work, size, is_tiny=False))

    return command


def _demo(bench: Bench, output: Path, size: float) -> list[str]:
    """The demo's job, on the input of the TPC-H jobs."""
    source = inputs.prepare(bench, output, JOBS["duckdb-tpch"], size)
    return _python(legs.JOB, source, bench.work / "output")


def _redis(bench: Bench, _: Path, size: float) -> list[str]:
    program = packages.find(REDIS, bench.build)
    if program is None:
        raise SkipError(f"{REDIS} (redis-tools) is not installed")
    return _python(PROGRAMS / "redis_random.py", program, int(size), int(size * 1500))


def _scan(_: Bench, __: Path, size: float) -> list[str]:
    return _python(PROGRAMS / "scan.py", int(size), 120)


SCORED: Mapping[str, ScoreJob] = {
    job.key: job
    for job in (
        ScoreJob("pandas", "the demo's job, pandas", {FULL: 1.0, TINY: 0.05}, _demo),
        ScoreJob(
            "polars",
            "group-by, polars",
            {FULL: 1e7, TINY: 2e5},
            _of_apps(JOBS["polars-groupby"]),
        ),
        ScoreJob(
            "duckdb", "TPC-H joins, DuckDB", {FULL: 2.0, TINY: 0.05}, _of_apps(JOBS["duckdb-tpch"])
        ),
        ScoreJob("redis", "Redis, reads at random", {FULL: 300, TINY: 64}, _redis),
        ScoreJob("scan", "a scan, numpy", {FULL: 100, TINY: 64}, _scan),
    )
}
