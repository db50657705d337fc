# SPDX-License-Identifier: Apache-2.0
"""The jobs: the demo's, those of `make bench-apps`, and some that show one thing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from infiniswap.demo import legs
from infiniswap.units import MIB
from isw_bench.apps.jobs import FULL, JOBS, QUICK, TINY, AppJob, Place, make_tpch, python
from isw_bench.bench import Bench

SIZES: Final = (FULL, QUICK, TINY)

_OUTPUT: Final = "output"
"""Where the demo's job writes, below its work directory."""
_CALLS: Final = 10


def _make_nothing(_: Bench, __: object, ___: float) -> None:
    """The program makes its own data."""


def _pandas(_: Bench, place: Place) -> list[str]:
    return [sys.executable, "-I", str(legs.JOB), str(place.source), str(place.work / _OUTPUT)]


def _written(place: Place) -> Mapping[str, Any]:
    return legs.digests(place.work / _OUTPUT)


def _duckdb_by_itself(_: Bench, place: Place) -> list[str]:
    return python("tpch_sql.py", "duckdb", place.source, "--memory", "default", place.work)


def _statistics(_: Bench, place: Place) -> list[str]:
    return python("numpy_statistics.py", int(place.size))


def _gather(_: Bench, place: Place) -> list[str]:
    return python("numpy_gather.py", int(place.size))


def _in_order(bench: Bench, place: Place) -> list[str]:
    return [bench.program("memory-job"), "--bytes", str(int(place.size) * MIB)]


def _at_random(bench: Bench, place: Place) -> list[str]:
    return [*_in_order(bench, place), "--touch-ms", str(round(bench.settings.seconds * 2000))]


def _calls(bench: Bench, place: Place) -> list[str]:
    return [*_in_order(bench, place), "--calls", str(_CALLS)]


_TPCH: Final = {FULL: 0.9, QUICK: 0.3, TINY: 0.15}
IN_ORDER: Final = AppJob(
    key="in-order",
    title="memory in order",
    about="{size} MiB written in order, then read twice",
    sizes={FULL: 1024, QUICK: 512, TINY: 256},
    make=_make_nothing,
    command=_in_order,
    input_name="none",
    maker="",
    files=(),
    needs_build=True,
)

PANDAS: Final = AppJob(
    key="pandas",
    title="the demo's pandas job",
    about="the job of `infiniswap demo` on TPC-H data of scale factor {size}",
    sizes=_TPCH,
    make=make_tpch,
    command=_pandas,
    input_name="tpch",
    maker="",
    files=(),
    answer=_written,
    modules=("pandas", "pyarrow"),
)
NUMPY: Final = AppJob(
    key="numpy",
    title="numpy statistics",
    about="statistics of a matrix of {size} MiB in numpy",
    sizes={FULL: 2048, QUICK: 512, TINY: 160},
    make=_make_nothing,
    command=_statistics,
    input_name="none",
    maker="",
    files=("numpy_statistics.py",),
    modules=("numpy",),
)
DUCKDB: Final = replace(JOBS["duckdb-tpch"], key="duckdb", sizes=_TPCH)
"""It may take all memory, whatever limit it sees."""
DUCKDB_BY_ITSELF: Final = replace(
    DUCKDB, key="duckdb-as-it-comes", command=_duckdb_by_itself, spill=None
)
GATHER: Final = replace(
    NUMPY,
    key="gather",
    title="numpy, in order and at random",
    about="an array of {size} MiB read in order six times, then gathered from at random, in numpy",
    sizes={FULL: 600, QUICK: 300, TINY: 160},
    command=_gather,
    files=("numpy_gather.py",),
)
RANDOM: Final = replace(
    IN_ORDER,
    key="random",
    title="memory at random",
    about="{size} MiB of which pages are touched at random",
    sizes={FULL: 512, QUICK: 256, TINY: 160},
    command=_at_random,
)
CALLS: Final = replace(
    RANDOM,
    key="calls",
    title="system calls",
    about="{size} MiB of memory, and then posix_spawn, munmap of half of it, fork and exec",
    command=_calls,
)


def _of_apps(key: str, full: float, quick: float) -> AppJob:
    """One of bench-apps, smaller: a row of `far` is run many times."""
    job = JOBS[key]
    return replace(job, sizes={FULL: full, QUICK: quick, TINY: job.sizes[TINY]}, spill=None)


JOIN: Final = _of_apps("pandas-join", 4e6, 1e6)
GROUP_BY: Final = _of_apps("pandas-groupby", 4e6, 1e6)
POLARS_JOIN: Final = _of_apps("polars-join", 4e6, 1e6)
POLARS_GROUP_BY: Final = _of_apps("polars-groupby", 4e6, 1e6)
PAGERANK: Final = _of_apps("pagerank", 20, 18)
MEMCACHED_ETC: Final = _of_apps("memcached-etc", 256, 128)
MEMCACHED_SYS: Final = _of_apps("memcached-sys", 256, 128)
REDIS: Final = _of_apps("redis-bgsave", 256, 128)
OLTP: Final = _of_apps("postgres-oltp", 5e5, 1e5)
