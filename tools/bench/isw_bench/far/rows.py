# SPDX-License-Identifier: Apache-2.0
"""The rows: which job runs under which limit with which rivals, and what its figures have to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from isw_bench.apps.jobs import AppJob
from isw_bench.apps.plan import DISK, FAR, FAR_KILLED, FAR_LOSSY, OURS
from isw_bench.far import jobs
from isw_bench.results import Target, at_least, at_most

NO_LIMIT: Final = "no limit"
"""The side without a limit, plain or with huge pages, whichever is faster."""

TODAY: Final = (DISK, OURS, FAR)
LOSSY: Final = (*TODAY, FAR_LOSSY)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: two sides of a row.

    Attributes:
        what: was measured.
        unit: of the values.
        key: names the value of both sides; `their_key` where the other side's is another one.
        ours, theirs: rivals, or NO_LIMIT.
        better: which direction is good.
        target, must: see results.Figure.
        their_name: of the other side; "": as `theirs`.
    """

    what: str
    unit: str
    key: str
    ours: str
    theirs: str
    better: Literal["lower", "higher"] = "lower"
    target: Target | None = None
    must: Target | None = None
    their_key: str = ""
    their_name: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One job under one limit.

    Attributes:
        name: as --rows has it.
        job: what runs.
        share: percent of the job's peak that it may have in memory.
        rivals: in the order of every round.
        lines: what is compared.
        needs_no_limit: whether the job also runs in every round without a limit, in both ways; else
            once.
    """

    name: str
    job: AppJob
    share: int
    rivals: Sequence[str]
    lines: Sequence[Line]
    needs_no_limit: bool = False


def _faster(target: float | None = None, must: float | None = None) -> Line:
    return Line(
        "time of the swap file / of far memory", "s", "elapsed_s", DISK, FAR, "higher",
        None if target is None else at_least(target), None if must is None else at_least(must),
    )  # fmt: skip


def _slower(target: float | None = None, must: float | None = None, rival: str = FAR) -> Line:
    return Line(
        f"time with {rival}", "s", "elapsed_s", rival, NO_LIMIT, "lower",
        None if target is None else at_most(target), None if must is None else at_most(must),
    )  # fmt: skip


_THAN_RUN: Final = Line(
    f"time with {OURS}, swap / with far memory", "s", "elapsed_s", OURS, FAR, "higher"
)
_AS_RUN: Final = replace(_THAN_RUN, target=at_least(1), must=at_least(0.95))
_SERVED: Final = Line(
    "requests served", "1/s", "ops_per_s", FAR, OURS, "higher", at_least(1), at_least(0.95)
)
_BUSY: Final = (
    Line(
        "processor time of job and device", "s", "own_cpu_s", FAR, NO_LIMIT, "lower", at_most(1.5),
        at_most(2.0),
    ),
    Line("processor time of donors", "s", "donors_cpu_s", FAR, OURS),
    Line("processor time of kernel threads", "s", "kernel_cpu_s", FAR, OURS),
)  # fmt: skip
_PEAK: Final = Line(
    "peak of job, device and rings beyond that with swap", "MiB", "beyond_mib", FAR, FAR, "lower",
    at_most(0.05), at_most(0.10), "local_mib", "--local",
)  # fmt: skip


def _stalls(name: str, key: str) -> tuple[Line, ...]:
    return tuple(
        Line(f"{name}, {title}", "µs", f"{key}_{part}_us", FAR, DISK)
        for part, title in (("p999", "p99.9"), ("max", "longest"))
    )


def _halves(name: str, job: AppJob, faster: Line) -> tuple[Row, ...]:
    """With half of its memory, and with a quarter."""
    lines = (faster, _THAN_RUN, _slower())
    return (
        Row(f"{name}-half", job, 50, TODAY, lines, True),
        Row(f"{name}-quarter", job, 25, TODAY, lines, True),
    )


def _fits(job: AppJob, must: float) -> tuple[Row, ...]:
    """The agent is there and has nothing to do, or hardly anything.

    Args:
        must: of the second row.
    """
    slower = Line(
        "time with far memory", "s", "elapsed_s", FAR, DISK, "lower", at_most(1.02), at_most(must),
        their_name="the same limit with swap",
    )  # fmt: skip
    return (
        Row(f"no-pressure-{job.key}", job, 200, (FAR,), (_slower(1.02, 1.05),), True),
        Row(f"fits-{job.key}", job, 105, (DISK, FAR), (slower, _slower()), True),
    )


ROWS: Final = (
    Row(
        "pandas-half", jobs.PANDAS, 50, LOSSY,
        (_slower(1.15, 1.5), _faster(2.4, 1.8), _THAN_RUN, _slower(rival=FAR_LOSSY),
         _slower(rival=OURS), *_BUSY, _PEAK), True,
    ),
    Row(
        "pandas-quarter", jobs.PANDAS, 25, LOSSY,
        (_slower(1.5, 2.0), _faster(2.5, 1.8), _THAN_RUN, _slower(rival=FAR_LOSSY),
         _slower(rival=OURS)), True,
    ),
    *_halves("numpy", jobs.NUMPY, _faster(2.0, 1.6)),
    *_halves("duckdb-lifted", jobs.DUCKDB, _faster(2.0, 1.6)),
    *_halves("join", jobs.JOIN, _faster(2.0, 1.6)),
    *_halves("group-by", jobs.GROUP_BY, _faster(2.0, 1.6)),
    *_halves("polars-join", jobs.POLARS_JOIN, _faster(1.6, 1.15)),
    *_halves("polars-group-by", jobs.POLARS_GROUP_BY, _faster(1.6, 1.15)),
    *(
        Row(name, job, 50, (OURS, FAR), (line,))
        for name, job, line in (
            ("pagerank", jobs.PAGERANK, _AS_RUN),
            ("memcached-etc", jobs.MEMCACHED_ETC, _SERVED),
            ("memcached-sys", jobs.MEMCACHED_SYS, _SERVED),
            ("redis", jobs.REDIS, _SERVED),
            ("oltp", jobs.OLTP, _SERVED),
        )
    ),
    *(
        Row(f"duckdb-as-it-comes-{share}", jobs.DUCKDB_BY_ITSELF, share, TODAY,
            (_faster(1.0, 0.9), _THAN_RUN, _slower()), True)
        for share in (50, 67)
    ),
    Row(
        "in-order", jobs.IN_ORDER, 25, LOSSY,
        (
            Line("read", "MB/s", "read_per_s", FAR, DISK, "higher", at_least(5), at_least(3)),
            Line("written, no backup", "MB/s", "write_per_s", FAR_LOSSY, DISK, "higher",
                 at_least(2), at_least(1.3)),
            Line("written", "MB/s", "write_per_s", FAR, DISK, "higher", at_least(1), at_least(0.8)),
            Line("read", "MB/s", "read_per_s", FAR, OURS, "higher"),
            Line("written", "MB/s", "write_per_s", FAR, OURS, "higher"),
            *_stalls("64 KiB read", "read"), *_stalls("64 KiB written", "write"),
        ),
    ),
    Row("gather", jobs.GATHER, 50, TODAY, (_faster(1.8, 1.3), _THAN_RUN, _slower()), True),
    Row(
        "random", jobs.RANDOM, 50, TODAY,
        (
            Line("touches", "1/s", "touch_per_s", FAR, DISK, "higher", at_least(0.7),
                 at_least(0.4)),
            Line("touches", "1/s", "touch_per_s", FAR, OURS, "higher"),
            *_stalls("touch", "touch"),
        ),
    ),
    Row(
        "take-over",
        jobs.RANDOM,
        50,
        (FAR, FAR_KILLED),
        (
            Line(
                "longest wait when the device's process is killed",
                "ms",
                "paused_ms",
                FAR_KILLED,
                FAR,
                their_key="longest_ms",
            ),
        ),
    ),
    Row(
        "calls", jobs.CALLS, 50, TODAY,
        tuple(Line(what, "ms", f"{key}_ms", FAR, DISK) for what, key in (
            ("posix_spawn", "spawn"), ("munmap of half", "munmap"),
            ("first fork and exec", "first_fork"), ("fork and exec", "fork"),
        )),
    ),
    *_fits(jobs.PANDAS, 1.05), *_fits(jobs.DUCKDB, 1.33),
)  # fmt: skip
"""In the order of every round, rows of the same job side by side where that costs nothing.

Under a limit into which DuckDB fits it must reach what a prototype without any guard reaches, with
a copy and a wake-up of another process more each way (docs/benchmarks.md, What was tried).
"""


def chosen(names: Sequence[str]) -> list[Row]:
    """The rows of these names, where `pandas` also names `pandas-half`; all when there is none.

    Raises:
        ValueError: a name that fits no row.
    """
    unknown = [name for name in names if not any(_is_named(row, (name,)) for row in ROWS)]
    if unknown:
        raise ValueError(f"there is no row {unknown[0]!r}: {', '.join(row.name for row in ROWS)}")
    return [row for row in ROWS if not names or _is_named(row, names)]


def _is_named(row: Row, names: Iterable[str]) -> bool:
    return any(row.name == name or row.name.startswith(f"{name}-") for name in names)
