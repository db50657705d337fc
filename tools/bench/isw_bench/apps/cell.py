# SPDX-License-Identifier: Apache-2.0
"""One cell: a job under one rival, watched from its start to its end."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from infiniswap.demo.data import forget_cached_pages
from infiniswap.device.jobs.usage import Sampler
from infiniswap.errors import ConflictError
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import try_read_text
from infiniswap.system.swap import active_areas
from isw_bench.apps import plan, rivals
from isw_bench.apps.accounting import (
    BusyTimes,
    ProcessTimes,
    kernel_thread_kind,
    paged,
    resident_bytes,
)
from isw_bench.apps.jobs import LAUNCH, AppJob, Place, python
from isw_bench.apps.plan import FAILED, KILLED, NO_ROOM, OK, TIMEOUT
from isw_bench.apps.rivals import Ready
from isw_bench.bench import Bench
from isw_bench.children import Child
from isw_bench.scope import marked_processes

_TICK_S = 0.05
_LOOK_S = 1.0
_SETTLE_S = 2.0
"""Before the job starts. Beside a run's first seconds its donors make spare slabs, with processors
that are another host's in a cluster: a job of three seconds took 0.3 s longer for it."""
_ROOM_SHARE = 0.05
"""Of the limit: when a pool leaves less than that, the job does not fit."""
_FRONT_ENDS = {"/dev/ublkb": "ublk", "/dev/nbd": "nbd", "/dev/loop": "FUSE"}


class Watch:
    """What is seen of a job while it runs.

    Args:
        bench: of the cell.
        ready: the rival.
        child: what was started.
    """

    def __init__(self, bench: Bench, ready: Ready, child: Child) -> None:
        self._bench = bench
        self._ready = ready
        self._child = child
        self._cgroup: MemoryCgroup | None = None
        self._sampler: Sampler | None = None
        self._looked_s = 0.0
        self._device: frozenset[int] = frozenset()
        self._kernel = BusyTimes(kernel_thread_kind)
        self._processes = BusyTimes(self._kind)
        self._peaks = {"pool_bytes": 0, "device_bytes": 0}
        self._has_room = True
        self._front_end = ""

    def await_end(self, timeout_s: float) -> str:
        """Returns when the job has ended, or must: "" or why it must."""
        end_s = time.monotonic() + timeout_s
        self._look()
        while self._child.is_running:
            self._tick()
            if not self._has_room:
                return NO_ROOM
            if time.monotonic() >= end_s:
                return TIMEOUT
            time.sleep(_TICK_S)
        self._tick()
        self._look()
        return ""

    def kill(self) -> None:
        """Ends the job."""
        if self._cgroup is not None:
            self._cgroup.kill()

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel killed for the limit."""
        return self._sampler.peaks.oom_kills if self._sampler else 0

    def figures(self) -> dict[str, Any]:
        """Processor time and memory."""
        processes = self._processes.totals()
        memory: dict[str, int] = dict(self._peaks)
        if self._sampler is not None:
            peaks = self._sampler.peaks
            memory |= {"anon_bytes": peaks.anon, "inside_bytes": peaks.local}
        busy = {
            "device": processes.get("device", 0.0),
            "donors": processes.get("donors", 0.0),
            # Reclaim for the pool's sake happens in that process.
            "kernel": {**self._kernel.totals(), "balloon": processes.get("balloon", 0.0)},
        }
        return {"busy_s": busy, "memory": memory, "front_end": self._front_end}

    def _tick(self) -> None:
        if self._cgroup is None:
            self._cgroup = self._ready.cgroup(self._child)
        if self._cgroup is not None:
            if self._sampler is None:
                self._sampler = Sampler(self._cgroup, self._ready.area)
            self._sampler.sample()
            self._look_at_pool()
        self._processes.sample_known()
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._look()

    def _look(self) -> None:
        """The slower part of a tick."""
        self._looked_s = time.monotonic()
        inside = frozenset(self._cgroup.pids() if self._cgroup else ())
        marked = frozenset(marked_processes(self._bench.scope.mark))
        if self._ready.donors:  # else all that is outside starts or ends
            self._device = marked - inside - set(self._ready.donors)
            self._front_end = self._front_end or front_end(area.path for area in active_areas())
        self._raise_peak("device_bytes", resident_bytes(self._device))
        self._kernel.sample()
        self._processes.sample()

    def _kind(self, pid: int, _: ProcessTimes) -> str | None:
        if pid in self._ready.donors:
            return "donors"
        if pid == self._ready.balloon:
            return "balloon"
        return "device" if pid in self._device else None

    def _look_at_pool(self) -> None:
        ready, limit_bytes = self._ready, self._bench.settings.swap_limit_bytes
        if ready.pool_bytes is not None:
            pool_bytes = ready.pool_bytes()
            self._raise_peak("pool_bytes", pool_bytes)
            left_bytes = limit_bytes - pool_bytes
            self._has_room = left_bytes >= _ROOM_SHARE * limit_bytes and ready.counts_pool()

    def _raise_peak(self, name: str, value: int) -> None:
        self._peaks[name] = max(self._peaks[name], value)


def front_end(paths: Iterable[str]) -> str:
    """Of the device of ours that is one of these swap areas; "" when there is none."""
    for path in paths:
        for prefix, name in _FRONT_ENDS.items():
            if path.startswith(prefix):
                return name
    return ""


def measure(
    bench: Bench, job: AppJob, place: Place, rival: str, timeout_s: float
) -> dict[str, Any]:
    """Runs the job under the rival, within the limit in the settings.

    Raises:
        SkipError: this host cannot have the rival.
        ConflictError: another swap area is active.
        InfiniswapError: the rival could not be set up.
    """
    begin_s = time.monotonic()
    if areas := active_areas():
        raise ConflictError(
            f"swap is active ({areas[0].path}), and would take the rivals' pages",
            mend="Switch it off while this runs: swapoff -a.",
        )
    report, log = bench.work / "report.json", bench.work / "job.log"
    for path in (report, log, bench.work / "summary.json"):
        path.unlink(missing_ok=True)
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.mkdir(mode=0o755)
    forget_cached_pages(path for path in place.source.rglob("*") if path.is_file())
    try:
        with rivals.RIVALS[rival](bench) as ready:
            pause_s = 0.0 if place.is_tiny else _SETTLE_S
            command = _command(bench, job, place, rival)
            argv = ready.command(python(LAUNCH.name, report, pause_s, *command))
            environment = rivals.environment(bench, place.work)
            before = paged()
            with bench.running("job", argv, changes=environment) as child:
                watch = Watch(bench, ready, child)
                status = watch.await_end(timeout_s)
                if status:
                    watch.kill()
            after = paged()
        answer = None if job.answer is None else functools.partial(job.answer, place)
        found = judged(status, try_read_text(report), watch.oom_kills, watch.figures(), answer)
        if ready.summary is not None:
            found["run"] = json.loads(try_read_text(ready.summary) or "{}")
        if status == TIMEOUT:
            found["elapsed_s"] = timeout_s
        if found["status"] == FAILED:
            found["why"] += f" {(try_read_text(log) or '').strip()[-600:]}"
    finally:
        for path in rivals.leftover_files(bench.work):
            path.unlink(missing_ok=True)
        shutil.rmtree(place.work, ignore_errors=True)
    return {
        **found,
        "paged": asdict(after.since(before)),
        "limit_bytes": bench.settings.swap_limit_bytes,
        "took_s": round(time.monotonic() - begin_s, 2),
    }


def _command(bench: Bench, job: AppJob, place: Place, rival: str) -> Sequence[str]:
    if rival == plan.SPILL and job.spill is not None:
        return job.spill(bench, place, bench.settings.swap_limit_bytes)
    return job.command(bench, place)


def judged(
    status: str,
    report: str | None,
    oom_kills: int,
    figures: dict[str, Any],
    answer: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A cell's result from what the launcher reported.

    Args:
        status: why the job had to be ended, or "".
        report: the launcher's, None when it wrote none.
        oom_kills: of the job's cgroup.
        figures: from the watch.
        answer: reads what the job left in files; None: it prints its answer.
    """
    if status:
        return {"status": status, **figures}
    if report is None:
        why = "the job left no report;"
        return {"status": KILLED if oom_kills else FAILED, "why": why, **figures}
    told = json.loads(report)
    busy = {"job": told["user_s"] + told["system_s"], **figures["busy_s"]}
    found = {**figures, "busy_s": busy, "elapsed_s": told["elapsed_s"]}
    if told["code"]:
        killed = oom_kills or told["code"] == -signal.SIGKILL  # nobody else sends that
        why = f"the job ended with exit code {told['code']}: {told['said'][-300:]}"
        return {"status": KILLED if killed else FAILED, "why": why, **found}
    if answer is not None:
        return {"status": OK, **found, "check": answer()}
    try:
        return {"status": OK, **found, **json.loads(told["said"])}
    except ValueError:
        return {"status": FAILED, "why": f"the job printed {told['said'][:300]!r};", **found}


def agrees(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    """Whether two jobs' `check` are the same: numbers may differ by that part, as parallel sums are
    rounded in any order."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agrees(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agrees, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= tolerance * max(abs(one), abs(other))
    return bool(one == other)
