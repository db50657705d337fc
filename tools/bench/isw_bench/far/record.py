# SPDX-License-Identifier: Apache-2.0
"""`python -m isw_bench record JOB` runs a job with the recorder and keeps the trace.

See tools/bench/c/far/record.c.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from infiniswap.demo.children import environment as quiet_libraries
from infiniswap.errors import SystemCallError, UsageError
from infiniswap.system.userfault import far_refusal
from isw_bench.apps import inputs
from isw_bench.apps.cell import agrees
from isw_bench.apps.jobs import FULL, JOBS, QUICK, TINY, AppJob, Place
from isw_bench.bench import Bench, Settings, SkipError, build_programs, require_root
from isw_bench.children import output_of
from isw_bench.exits import exit_code
from isw_bench.far import jobs, traces
from isw_bench.far.traces import Record
from isw_bench.scope import WORK_DIR, Scope
from isw_bench.suite import ROOT

_LIBRARY: Final = "libisw-bench-far-record.so"
_RUN_S: Final = 1800.0
_LEFT_SHARE_MAX: Final = 0.02
"""A trace is refused if the kernel took over a larger share of the touched pages: the recorder does
not see them any longer."""
_KNOWN: Final[Mapping[str, AppJob]] = {
    **JOBS,
    **{job.key: job for job in (jobs.PANDAS, jobs.NUMPY, jobs.DUCKDB, jobs.GATHER, jobs.IN_ORDER)},
}


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m isw_bench record",
        description="Records what a job touches of its large memory, for `make bench` victims.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("job", metavar="JOB", help=", ".join(_KNOWN))
    add("--size", choices=(FULL, QUICK, TINY), default=QUICK, help="input size (%(default)s)")
    add(
        "--pages",
        type=int,
        choices=[1 << power for power in range(10)],
        default=16,
        help="pages per recorded part; 1 for random access (%(default)s)",
    )
    add("--output", type=Path, default=traces.DIRECTORY, help="directory (%(default)s)")
    build = ROOT / "build" / "bench"
    add("--build", type=Path, default=build, help="where to build the programs (%(default)s)")
    add("--work", type=Path, default=WORK_DIR, help="disk directory for a run's files")
    return parser


def _answer(job: AppJob, place: Place, printed: str) -> Mapping[str, Any]:
    if job.answer is not None:
        return job.answer(place)
    check: Mapping[str, Any] = json.loads(printed.strip().splitlines()[-1])["check"]
    return check


class _Recording:
    """One job with and without the recorder.

    Args:
        bench: of the run.
        job: to record.
        place: where it runs.
    """

    def __init__(self, bench: Bench, job: AppJob, place: Place) -> None:
        self._bench = bench
        self._job = job
        self._place = place
        self._libraries = quiet_libraries({})

    def _run(self, changes: Mapping[str, str], fds: Sequence[int] = ()) -> Mapping[str, Any]:
        shutil.rmtree(self._place.work, ignore_errors=True)
        self._place.work.mkdir()
        argv = self._job.command(self._bench, self._place)
        changes = {**self._libraries, **changes}
        printed = output_of(argv, self._bench.scope.mark, _RUN_S, changes, fds)
        return _answer(self._job, self._place, printed)

    def record(self, pages: int) -> list[Record]:
        """Runs the job twice and returns the trace of the process that touched most.

        Raises:
            SystemCallError: the job failed, or its answer or its trace is not right.
            DeadlineError: it took too long.
        """
        directory = self._bench.work / "traces"
        directory.mkdir()
        wanted = self._run({})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            changes = {
                "LD_PRELOAD": str(self._bench.build / "bench" / _LIBRARY),
                "INFINISWAP_FAR": f"{theirs.fileno()}:-1:",
                "ISW_FAR_TRACE": str(directory),
                "ISW_FAR_TRACE_PAGES": str(pages),
            }
            if not agrees(wanted, self._run(changes, (theirs.fileno(),))):
                raise SystemCallError("the job's answer is another one with the recorder")
        found = [list(traces.shortened(traces.recorded(path))) for path in directory.iterdir()]
        return checked(max(found, key=_touched, default=[]))


def _touched(records: Sequence[Record], kind: int = traces.TOUCH) -> int:
    return sum(record.pages for record in records if record.kind == kind)


def checked(records: list[Record]) -> list[Record]:
    """Returns a trace that says enough of its job.

    Raises:
        SystemCallError: it does not.
    """
    touched = _touched(records)
    if not touched:
        raise SystemCallError("no process of the job touched large memory")
    if any(record.kind == traces.CUT for record in records):
        raise SystemCallError("the job is too large: not all of it was recorded")
    if _touched(records, traces.LEFT) > _LEFT_SHARE_MAX * touched:
        raise SystemCallError("the kernel took much of the job's memory, after a fork for example")
    return records


def run(args: argparse.Namespace) -> int:
    """Records a job.

    Raises:
        UsageError: there is no such job, or it cannot be recorded here.
        SystemCallError, DeadlineError: see _Recording.record.
    """
    job = _KNOWN.get(args.job)
    if job is None:
        raise UsageError(f"there is no job {args.job!r}: {', '.join(_KNOWN)}")
    if missing := job.missing(args.build):
        raise UsageError(f"{job.key} needs what is not installed: {', '.join(missing)}")
    build_programs(ROOT, args.build)
    size = job.sizes[args.size]
    with Scope(args.work) as scope:
        bench = Bench(Settings(1, 1.0), scope, ROOT, args.build.resolve())
        try:
            require_root("the recorder's userfaultfd")
            if refusal := far_refusal():
                raise UsageError(refusal)
            source = inputs.prepare(bench, bench.work, job, size)
            place = Place(source, bench.work / "job", size, args.size == TINY)
            records = _Recording(bench, job, place).record(args.pages)
        except SkipError as error:
            raise UsageError(str(error)) from error
        args.output.mkdir(parents=True, exist_ok=True)
        target = args.output / f"{job.key}{traces.SUFFIX}"
        part = target.with_suffix(".part")
        traces.write(part, records)
        part.rename(target)
    bench.say(f"wrote {target}, {target.stat().st_size} bytes")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    return exit_code(lambda: run(build_parser().parse_args(argv)))
