# SPDX-License-Identifier: Apache-2.0
"""The jobs: other people's benchmarks, each a program of its own that knows nothing of Infiniswap.

A program prints one line of JSON at its end: `check`, numbers that every rival's run must agree
on, and from servers `ops_per_s` with percentiles. A job without that is timed as a whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infiniswap.demo import data
from infiniswap.units import MIB
from isw_bench.apps import packages
from isw_bench.bench import Bench, SkipError

PROGRAMS = Path(__file__).parent / "programs"
LAUNCH = PROGRAMS / "launch.py"
FULL, QUICK, TINY = "full", "quick", "tiny"
"""Sizes of inputs; the last is for tests of this suite."""

_MAKE_S = 1200.0
_HEAP_MIB, _HEAP_MIB_MIN = 2048, 1024
"""Of Spark, by scale factor; it does not start with less than 471."""
_LINE_BYTES = 3 * 33
"""Of sort's buffer, for a line of 33 bytes."""
_MANY = 10_000
_REDIS = "redis-check-rdb"
"""Debian's redis-server is a link to it, in a package that starts a service."""
_ROW_BYTES = 4 * 300
"""Of sysbench's four tables, with their indexes."""
_QUERIES = "TPC-H queries 1, 3, 5, 9, 13, 18 and 21 at scale factor {size} in"
_SPILL_SHARE = 0.7
"""Of the limit, for what an application counts as its own; the rest is all its other memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs.

    Attributes:
        source: directory of its input.
        work: an empty directory of its own, on disk.
        size: one of the job's sizes.
        is_tiny: whether it is the one for tests.
    """

    source: Path
    work: Path
    size: float
    is_tiny: bool


Make = Callable[[Bench, Path, float], None]
Command = Callable[[Bench, Place], list[str]]
Spill = Callable[[Bench, Place, int], list[str]]
Answer = Callable[[Place], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class AppJob:
    """One job.

    Attributes:
        key: in results and on the command line.
        title: in tables.
        about: what it does; `{size}` stands for its size.
        sizes: by FULL, QUICK, TINY.
        make: writes the input of a size into an empty directory.
        command: the program and its arguments.
        input_name: of its input; jobs with the same name share it.
        maker: the program that makes the input, or "".
        files: its other programs; when one has changed, earlier results do not count any longer.
        answer: reads the files that it has written, what every rival's run must agree on; None: it
            prints that.
        spill: the command that keeps to a limit in its own way; None: it has none.
        modules: that Python must find.
        packages: of Debian, by a program of theirs.
        servers: likewise, of packages that would start a service.
        is_extra: runs only when it is named.
        needs_build: runs a program of tools/bench/c.
    """

    key: str
    title: str
    about: str
    sizes: Mapping[str, float]
    make: Make
    command: Command
    input_name: str
    maker: str
    files: Sequence[str]
    answer: Answer | None = None
    spill: Spill | None = None
    modules: Sequence[str] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    servers: Mapping[str, str] = field(default_factory=dict)
    is_extra: bool = False
    needs_build: bool = False

    def missing(self, build: Path) -> list[str]:
        """What is not installed: modules, programs."""
        found = [name for name in self.modules if importlib.util.find_spec(name) is None]
        programs = {**self.packages, **self.servers}
        return found + [
            f"{name} ({package})"
            for name, package in programs.items()
            if packages.find(name, build) is None
        ]

    def described(self, size: float) -> str:
        """What it does, of that size."""
        return self.about.format(size=f"{size:,.0f}" if size >= _MANY else f"{size:g}")

    def digest(self) -> str:
        """Of its programs."""
        return _digest(LAUNCH.name, self.maker, *self.files)

    def input_digest(self) -> str:
        """Of the program that makes its input."""
        return _digest(self.maker)


def _digest(*names: str) -> str:
    texts = [(PROGRAMS / name).read_bytes() for name in names if name]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


def python(program: str, *args: object) -> list[str]:
    """The command for one of our programs; only its own directory and what is installed are
    imported from."""
    return [sys.executable, "-I", str(PROGRAMS / program), *map(str, args)]


# ------------------------------------------------------------------------ db-benchmark


def _h2o(question: str, library: str) -> tuple[Make, Command]:
    def make(bench: Bench, directory: Path, rows: float) -> None:
        bench.run("input", python("h2o_data.py", question, directory, int(rows)), _MAKE_S)

    def command(_: Bench, place: Place) -> list[str]:
        return python(f"h2o_{library}.py", question, place.source)

    return make, command


def _h2o_job(question: str, library: str, spill: Spill | None) -> AppJob:
    make, command = _h2o(question, library)
    name = {"groupby": "group-by", "join": "join"}[question]
    return AppJob(
        key=f"{library}-{question}",
        title=f"{library}, db-benchmark {name}",
        about=f"the db-benchmark's {name} questions on {{size}} rows in {library}",
        sizes={FULL: 1e7, QUICK: 2e6, TINY: 2e5},
        make=make,
        command=command,
        input_name=question,
        maker="h2o_data.py",
        files=(f"h2o_{library}.py",),
        spill=spill,
        modules=("numpy", "pyarrow", library),
    )


def _stream(question: str) -> Spill:
    def command(_: Bench, place: Place, limit_bytes: int) -> list[str]:
        return python("h2o_polars.py", question, place.source, "--streaming")

    return command


# ------------------------------------------------------------------------------- TPC-H


def make_tpch(bench: Bench, directory: Path, scale: float) -> None:
    """All tables of that scale factor."""
    program = data.generator()
    if program is None:
        raise SkipError("tpchgen-cli is not installed")
    argv = [program, "parquet", "--quiet", "--scale-factor", f"{scale:g}"]
    bench.run("input", [*argv, "--output-dir", str(directory)], _MAKE_S)


def _tpch(_: Bench, place: Place) -> list[str]:
    return python("tpch_sql.py", "duckdb", place.source)


def _spark(_: Bench, place: Place) -> list[str]:
    """With a heap that holds all tables."""
    heap_mib = max(_HEAP_MIB_MIN, int(place.size * _HEAP_MIB))
    return python("tpch_sql.py", "spark", place.source, heap_mib, place.work)


def _spark_spill(_: Bench, place: Place, limit_bytes: int) -> list[str]:
    heap_mib = int(limit_bytes * _SPILL_SHARE) // MIB
    return python("tpch_sql.py", "spark", place.source, heap_mib, place.work)


def _tpch_frames(library: str, spill: bool) -> AppJob:
    """Of a library of data frames."""
    program = f"tpch_{library}.py"

    def command(_: Bench, place: Place) -> list[str]:
        return python(program, place.source)

    def stream(_: Bench, place: Place, limit_bytes: int) -> list[str]:
        return python(program, place.source, "--streaming")

    return AppJob(
        key=f"{library}-tpch",
        title=f"{library}, TPC-H",
        about=f"{_QUERIES} {library}, in memory",
        sizes={FULL: 2, QUICK: 0.5, TINY: 0.05},
        make=make_tpch,
        command=command,
        input_name="tpch",
        maker="",
        files=(program, "tpch_tables.json"),
        spill=stream if spill else None,
        modules=("pandas", "pyarrow") if library == "pandas" else (library,),
        is_extra=True,
    )


def _tpch_spill(_: Bench, place: Place, limit_bytes: int) -> list[str]:
    size = f"{int(limit_bytes * _SPILL_SHARE) // MIB}MiB"
    return python("tpch_sql.py", "duckdb", place.source, "--memory", size, place.work)


# ------------------------------------------------------------------------------ graphs


def _make_graph(bench: Bench, directory: Path, scale: float) -> None:
    bench.run("input", python("rmat.py", directory, int(scale)), _MAKE_S)


def _pagerank(_: Bench, place: Place) -> list[str]:
    return python("pagerank.py", place.source)


# ------------------------------------------------------------------------------- lines


def _make_lines(bench: Bench, directory: Path, lines: float) -> None:
    bench.run("input", python("sort_lines.py", "make", directory, int(lines)), _MAKE_S)


def _sort(_: Bench, place: Place) -> list[str]:
    """With a buffer for all lines."""
    buffer_kib = int(place.size * _LINE_BYTES) // 1024
    return python("sort_lines.py", "run", place.source, buffer_kib)


def _sort_spill(_: Bench, place: Place, limit_bytes: int) -> list[str]:
    buffer_kib = int(limit_bytes * _SPILL_SHARE) // 1024
    return python("sort_lines.py", "run", place.source, buffer_kib)


# ----------------------------------------------------------------------------- servers


def _no_input(_: Bench, __: Path, ___: float) -> None:
    """The client makes what it stores."""


def _memcached(mix: str) -> Command:
    def command(bench: Bench, place: Place) -> list[str]:
        server, client = _server(bench, "memcached"), bench.program("key-value-load")
        return python("key_value.py", server, client, mix, f"{place.size:g}", _seconds(place))

    return command


def _memcached_job(mix: str, shares: str) -> AppJob:
    return AppJob(
        key=f"memcached-{mix}",
        title=f"memcached, {mix.upper()}",
        about=f"memcached with {{size}} MiB in values, the {mix.upper()} mix ({shares}), 32 "
        "connections in a closed loop",
        sizes={FULL: 512, QUICK: 256, TINY: 48},
        make=_no_input,
        command=_memcached(mix),
        input_name="none",
        maker="",
        files=("key_value.py",),
        servers={"memcached": "memcached"},
        needs_build=True,
    )


def _bgsave(bench: Bench, place: Place) -> list[str]:
    server, client = _server(bench, _REDIS), bench.program("key-value-load")
    return python("redis_bgsave.py", server, client, f"{place.size:g}", _seconds(place))


def _make_database(bench: Bench, directory: Path, rows: float) -> None:
    temporary = bench.work / "database"
    temporary.mkdir(mode=0o755)
    argv = ["make", directory, *_database(bench, rows)]
    bench.run(
        "input", python("transactions.py", *argv), _MAKE_S, changes={"TMPDIR": str(temporary)}
    )


def _transactions(bench: Bench, place: Place) -> list[str]:
    return python(
        "transactions.py", "run", place.source, *_database(bench, place.size), _seconds(place)
    )


def _database(bench: Bench, rows: float) -> list[str]:
    """Programs, rows of a table, and buffers with room for all tables to grow."""
    programs = Path(_server(bench, "postgres")).resolve().parent
    return [str(programs), str(int(rows)), str(64 + int(rows * _ROW_BYTES) // MIB)]


def _server(bench: Bench, name: str) -> str:
    found = packages.find(name, bench.build)
    if found is None:
        raise SkipError(f"{name} is not installed")
    return found


def _seconds(place: Place) -> int:
    """How long a server is asked."""
    return 3 if place.is_tiny else 15


# -------------------------------------------------------------------------------- all

_ALL = (
    _h2o_job("groupby", "pandas", None),
    _h2o_job("join", "pandas", None),
    _h2o_job("groupby", "polars", _stream("groupby")),
    _h2o_job("join", "polars", _stream("join")),
    AppJob(
        key="duckdb-tpch",
        title="DuckDB, TPC-H",
        about=f"{_QUERIES} DuckDB, in memory",
        sizes={FULL: 5, QUICK: 1, TINY: 0.05},
        make=make_tpch,
        command=_tpch,
        input_name="tpch",
        maker="",
        files=("tpch_sql.py", "tpch_tables.json"),
        spill=_tpch_spill,
        modules=("duckdb",),
    ),
    AppJob(
        key="pagerank",
        title="PageRank, scipy",
        about="twenty steps of PageRank on a scale-free graph of 2^{size} vertices, scipy.sparse",
        sizes={FULL: 21, QUICK: 19, TINY: 14},
        make=_make_graph,
        command=_pagerank,
        input_name="graph",
        maker="rmat.py",
        files=("pagerank.py",),
        modules=("numpy", "scipy"),
    ),
    _memcached_job("etc", "95 % GET"),
    _memcached_job("sys", "75 % GET"),
    AppJob(
        key="postgres-oltp",
        title="PostgreSQL, sysbench OLTP",
        about="sysbench's oltp_read_write with 16 connections on four tables of {size} rows, all "
        "in PostgreSQL's buffers",
        sizes={FULL: 1e6, QUICK: 2e5, TINY: 2e4},
        make=_make_database,
        command=_transactions,
        input_name="database",
        maker="transactions.py",
        files=(),
        packages={"sysbench": "sysbench"},
        servers={"postgres": "postgresql"},
    ),
    AppJob(
        key="sort",
        title="sort",
        about="GNU sort on {size} lines of 32 characters",
        sizes={FULL: 2e7, QUICK: 4e6, TINY: 4e5},
        make=_make_lines,
        command=_sort,
        input_name="lines",
        maker="sort_lines.py",
        files=(),
        spill=_sort_spill,
        modules=("numpy",),
        is_extra=True,
    ),
    _tpch_frames("pandas", spill=False),
    _tpch_frames("polars", spill=True),
    AppJob(
        key="spark-tpch",
        title="Spark, TPC-H",
        about=f"{_QUERIES} Spark, cached in one Java process",
        sizes={FULL: 2, QUICK: 0.5, TINY: 0.05},
        make=make_tpch,
        command=_spark,
        input_name="tpch",
        maker="",
        files=("tpch_sql.py", "tpch_tables.json"),
        spill=_spark_spill,
        modules=("pyspark",),
        packages={"java": "default-jre-headless"},
        is_extra=True,
    ),
    AppJob(
        key="redis-bgsave",
        title="Redis, ETC during BGSAVE",
        about="Redis with {size} MiB in values, the ETC mix (95 % GET), 32 connections in a closed "
        "loop, while one BGSAVE follows another",
        sizes={FULL: 512, QUICK: 256, TINY: 48},
        make=_no_input,
        command=_bgsave,
        input_name="none",
        maker="",
        files=("redis_bgsave.py",),
        packages={_REDIS: "redis-tools"},
        is_extra=True,
        needs_build=True,
    ),
)

JOBS: Mapping[str, AppJob] = {job.key: job for job in _ALL}
"""In the order of every round."""
