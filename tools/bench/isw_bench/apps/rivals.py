# SPDX-License-Identifier: Apache-2.0
"""The rivals: each sets up where a job's memory goes beyond its limit, for one run of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from infiniswap.demo.children import placed
from infiniswap.device.control import client
from infiniswap.device.process import runs
from infiniswap.device.spec import rundir
from infiniswap.errors import InfiniswapError
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.files import PROC, SYS, try_read_text
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.system.memory import UNLIMITED_BYTES, memory_hierarchy
from infiniswap.system.programs import infiniswap
from infiniswap.system.userfault import far_refusal
from infiniswap.units import MIB, format_size, round_up
from isw_bench import areas, cluster, zswap
from isw_bench.apps import plan
from isw_bench.apps.jobs import python
from isw_bench.areas import Area
from isw_bench.bench import Bench, SkipError
from isw_bench.children import Child
from isw_bench.scope import PREFIX, zram_numbers
from isw_bench.swapped import swapped_on

_DEVICE_SHARE = 1.5
"""Size of every swap area, of the job's peak."""
_SLABS = 8
_SLAB_BYTES_MAX = 1024 * MIB
_SLAB_BYTES_MIN = 16 * MIB
_LOOK_S = 0.1
_LOOK_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Ready:
    """A rival that is set up.

    Attributes:
        command: the job's command as it is started here.
        cgroup: of the job, None while there is none.
        area: path of the swap area, or "".
        pool_bytes: memory that a pool of compressed pages takes; None: there is none.
        counts_pool: whether it still counts against the limit.
        donors: pids.
        balloon: pid of the process that makes a pool count, 0 without one.
        summary: where `infiniswap run` writes its own; None: the rival has none.
    """

    command: Callable[[Sequence[str]], list[str]]
    cgroup: Callable[[Child], MemoryCgroup | None]
    area: str = ""
    pool_bytes: Callable[[], int] | None = None
    counts_pool: Callable[[], bool] = lambda: True
    donors: Sequence[int] = ()
    balloon: int = 0
    summary: Path | None = None


Rival = Callable[[Bench], AbstractContextManager[Ready]]
"""Raises SkipError when this host cannot have it."""


def sized(bench: Bench, peak_bytes: int, limit_bytes: int) -> Bench:
    """The same for a job of that peak: how large swap areas and slabs are."""
    slab_bytes = _SLAB_BYTES_MAX
    while slab_bytes > _SLAB_BYTES_MIN and slab_bytes * _SLABS > peak_bytes * _DEVICE_SHARE:
        slab_bytes //= 2
    device_bytes = round_up(int(peak_bytes * _DEVICE_SHARE), slab_bytes)
    settings = replace(
        bench.settings,
        swap_bytes=peak_bytes,
        swap_limit_bytes=limit_bytes,
        swap_device_bytes=device_bytes,
        slab_bytes=slab_bytes,
    )
    return bench.with_settings(settings)


def _in_cgroup(cgroup: MemoryCgroup, area: str = "") -> Ready:
    return Ready(lambda argv: placed(argv, [cgroup.path]), lambda _: cgroup, area)


@contextlib.contextmanager
def _alone(bench: Bench, limit_bytes: int) -> Iterator[Ready]:
    """A cgroup, and no swap."""
    with bench.scope.interrupts.hold():
        cgroup = create_memory_cgroup(f"{PREFIX}{bench.scope.mark}", limit_bytes)
    try:
        yield _in_cgroup(cgroup)
    finally:
        with bench.scope.interrupts.hold():
            cgroup.kill()
            cgroup.remove()


def _no_limit(bench: Bench) -> AbstractContextManager[Ready]:
    return _alone(bench, UNLIMITED_BYTES)


@contextlib.contextmanager
def _huge_pages(bench: Bench) -> Iterator[Ready]:
    """No limit, and glibc asks for huge pages for all that malloc gets from the kernel."""
    with _no_limit(bench) as ready:
        tunables = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
        yield replace(ready, command=lambda job: ready.command(["env", tunables, *job]))


def _own_spilling(bench: Bench) -> AbstractContextManager[Ready]:
    return _alone(bench, bench.settings.swap_limit_bytes)


@contextlib.contextmanager
def _swapping(
    bench: Bench, make: Callable[[Bench], AbstractContextManager[Area]]
) -> Iterator[Ready]:
    with make(bench) as area:
        try:
            with swapped_on(bench, area) as cgroup:
                yield _in_cgroup(cgroup, str(area.path))
        finally:
            if area.path.is_file():
                area.path.unlink(missing_ok=True)


def _disk(bench: Bench) -> AbstractContextManager[Ready]:
    return _swapping(bench, areas.disk)


def _cloud(bench: Bench) -> AbstractContextManager[Ready]:
    return _swapping(bench, areas.cloud)


@contextlib.contextmanager
def _counted(
    bench: Bench, ready: Ready, kind: str, path: Path, pool_bytes: Callable[[], int]
) -> Iterator[Ready]:
    """The same with a process in the job's cgroup that holds as much as the pool takes outside."""
    argv = python("balloon.py", kind, path, bench.settings.swap_limit_bytes)
    with bench.running("balloon", ready.command(argv)) as child:
        yield replace(
            ready,
            pool_bytes=pool_bytes,
            counts_pool=lambda: child.is_running,
            balloon=child.pid,
        )


@contextlib.contextmanager
def _zram(bench: Bench) -> Iterator[Ready]:
    with _swapping(bench, areas.zram) as ready:
        (number,) = zram_numbers(bench.work)
        path = SYS / "block" / f"zram{number}" / "mm_stat"

        def pool_bytes() -> int:
            return parse_mm_stat(try_read_text(path) or "")

        with _counted(bench, ready, "zram", path, pool_bytes) as counted:
            yield counted


def parse_mm_stat(text: str) -> int:
    """Memory that a zram device takes, from its mm_stat; 0 where there is none."""
    fields = text.split()
    return int(fields[2]) if len(fields) > 2 else 0


def _zswap_on(bench: Bench) -> AbstractContextManager[None]:
    """Its pool may take a part of the job's limit, then the pages that were not used for longest go
    to the swap area."""
    wanted = zswap.bounded(bench.settings.swap_limit_bytes)
    if wanted is None:
        raise SkipError(
            "this kernel has no zswap, or its smallest pool, 1 % of the machine's memory, is too "
            "much of the limit"
        )
    return zswap.settings(bench.work, bench.scope.interrupts, wanted)


@contextlib.contextmanager
def _zswap(bench: Bench) -> Iterator[Ready]:
    """In front of the swap file."""
    with _zswap_on(bench), _swapping(bench, areas.disk) as ready:
        if memory_hierarchy().version == 2:  # the kernel charges the pool to the job
            yield ready
            return
        with _counted(bench, ready, "zswap", PROC / "meminfo", zswap.pool_bytes) as counted:
            yield counted


@contextlib.contextmanager
def _ours(bench: Bench, *options: str, areas_of_device: int = 1) -> Iterator[Ready]:
    """`infiniswap run`, as a user would call it, with two donors on loopback that have room for so
    many areas of the device's size."""
    settings = bench.settings
    pool_bytes = areas_of_device * settings.swap_device_bytes // 2 + settings.slab_bytes
    summary = bench.work / "summary.json"
    with cluster.donors(bench, 2, settings.slab_bytes, pool_bytes) as donors:
        argv = infiniswap(
            *("run", "--local", format_size(settings.swap_limit_bytes)),
            *("--size", format_size(settings.swap_device_bytes)),
            *("--slab", format_size(settings.slab_bytes), "--donors", ",".join(donors)),
            *("--quiet", "--summary-json", str(summary), *options, "--"),
        )
        yield Ready(
            command=lambda job: [*argv, *job],
            cgroup=run_cgroup,
            donors=[child.pid for child in donors.values()],
            summary=summary,
        )


def _far(bench: Bench, *options: str) -> AbstractContextManager[Ready]:
    """Far memory lies beside the swap area, and is as large."""
    if (refusal := far_refusal()) is not None:
        raise SkipError(refusal)
    return _ours(bench, "--paging", "far", *options, areas_of_device=2)


@contextlib.contextmanager
def _far_killed(bench: Bench) -> Iterator[Ready]:
    """The process of the device is killed once, in the middle of the job."""
    ended = threading.Event()
    killer = threading.Thread(target=_kill_device, args=(bench, ended), daemon=True)
    with _far(bench) as ready:
        killer.start()
        try:
            yield ready
        finally:
            ended.set()
            killer.join(_LOOK_S_MAX)


def _kill_device(bench: Bench, ended: threading.Event) -> None:
    """Waits until far memory is in use and a standby is there, or until the job has ended."""
    run_dir = bench.work / "run"
    while not ended.wait(_LOOK_S):
        for name in rundir.running_names(run_dir):
            with contextlib.suppress(InfiniswapError, OSError):
                status = client.status(rundir.paths_of(name, run_dir, bench.work / "backup"))
                is_used = status.far is not None and status.far.used_bytes > 0
                if is_used and status.succession and status.succession.standby == "ready":
                    os.kill(status.pid, signal.SIGKILL)
                    return


def _far_without_backup(bench: Bench) -> AbstractContextManager[Ready]:
    return _far(bench, "--backup", "none", "--allow-data-loss")


@contextlib.contextmanager
def _ours_not_sealed(bench: Bench) -> Iterator[Ready]:
    with _ours(bench) as ready:
        yield replace(
            ready, command=lambda job: ["env", "INFINISWAP_DEVICE_SEAL=false", *ready.command(job)]
        )


@contextlib.contextmanager
def _ours_behind_zswap(bench: Bench) -> Iterator[Ready]:
    """The balloon joins the job's cgroup as soon as that is there, and ends with the job."""
    with _zswap_on(bench), _ours(bench) as ready:
        if memory_hierarchy().version == 2:
            yield ready
            return
        with bench.running("balloon", zswap.balloon(bench.settings.swap_limit_bytes)) as balloon:
            found: list[MemoryCgroup] = []

            def joined(child: Child) -> MemoryCgroup | None:
                cgroup = run_cgroup(child)
                if cgroup is not None:
                    cgroup.add(balloon.pid)
                    found.append(cgroup)
                return cgroup

            def counts() -> bool:
                return balloon.is_running or not any(cgroup.pids() for cgroup in found)

            yield replace(
                ready,
                cgroup=joined,
                pool_bytes=zswap.pool_bytes,
                counts_pool=counts,
                balloon=balloon.pid,
            )


@contextlib.contextmanager
def _ours_on_cloud(bench: Bench) -> Iterator[Ready]:
    with areas.limited_disk(bench) as lower, _ours(bench, "--backup", str(lower.path)) as ready:
        yield ready


def run_cgroup(child: Child) -> MemoryCgroup | None:
    """Of the `infiniswap run` that is this process; None while there is none."""
    wanted = runs.cgroup_name_or_none(child.pid)
    return next((cgroup for cgroup in find_job_cgroups() if cgroup.name == wanted), None)


RIVALS: dict[str, Rival] = {
    plan.UNLIMITED: _no_limit,
    plan.OURS: _ours,
    plan.OURS_PLAIN: _ours_not_sealed,
    plan.OURS_ZSWAP: _ours_behind_zswap,
    plan.OURS_CLOUD: _ours_on_cloud,
    plan.DISK: _disk,
    plan.CLOUD: _cloud,
    plan.ZRAM: _zram,
    plan.ZSWAP: _zswap,
    plan.SPILL: _own_spilling,
    plan.HUGE: _huge_pages,
    plan.FAR: _far,
    plan.FAR_LOSSY: _far_without_backup,
    plan.FAR_KILLED: _far_killed,
}


def environment(bench: Bench, temporary: Path) -> dict[str, str]:
    """Of every job, whoever runs it, with a directory for its temporary files.

    Arrow takes its memory from malloc: its own pool gives freed memory back some time later, so
    that the peak would depend on how busy the machine is.
    """
    backup = bench.work / "backup"
    backup.mkdir(exist_ok=True)
    return {
        **cluster.places(bench),
        "TMPDIR": str(temporary),
        "POLARS_TEMP_DIR": str(temporary),
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "INFINISWAP_DEVICE_BACKUP_DIR": str(backup),
    }


def leftover_files(work: Path) -> list[Path]:
    """Images of areas, which the next cell makes anew."""
    return [path for path in work.glob("*.img") if path.is_file()]
