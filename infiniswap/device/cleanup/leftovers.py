# SPDX-License-Identifier: Apache-2.0
"""Leftovers of killed processes: finds them, tells whose they are, and clears them.

`find` only looks, and names the command that takes each thing away. `clear` takes away what is
left of a `run`'s device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from infiniswap.device import frontends
from infiniswap.device.frontends import FRONT_ENDS, Places
from infiniswap.device.frontends.base import Leftover, Owner
from infiniswap.device.process.runs import abandoned_cgroups, end_job
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import InfiniswapError, UnavailableError
from infiniswap.system import swap
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.system.swap import SwapArea
from infiniswap.units import counted

_SWAPOFF_S_MAX = 60.0


def owners_of_areas(
    areas: Iterable[SwapArea], run_dir: Path, places: Places | None = None
) -> dict[SwapArea, Owner]:
    """The owners of those swap areas that are infiniswap devices."""
    owners = {
        str(path): owner
        for front_end in FRONT_ENDS.values()
        for path, owner in front_end.owners(run_dir, places or Places())
    }
    found = {area: owners.get(area.path) for area in areas}
    return {area: owner for area, owner in found.items() if owner is not None}


def find(run_dir: Path, places: Places | None = None) -> Iterator[Leftover]:
    """Everything that is left behind."""
    places = places or Places()
    died = rundir.died_names(run_dir)
    for name in died:
        doubt = rundir.why_not_believed(rundir.DevicePaths(name, run_dir / name, run_dir))
        if doubt is not None:
            yield Leftover(f"device {name}: {doubt.state}", doubt.mend)
            continue
        yield Leftover(
            f"the process of device {name} has died",
            f"infiniswap device start {name} (keeps the contents where that is possible), or "
            f"infiniswap device remove {name}",
        )
    for front_end in FRONT_ENDS.values():
        yield from front_end.leftovers(run_dir, died, places)
    yield from _links(places.links)
    yield from _cgroups()


def _links(link_dir: Path) -> Iterator[Leftover]:
    with contextlib.suppress(OSError):
        for link in sorted(link_dir.iterdir()):
            if link.is_symlink() and not link.exists():
                yield Leftover(f"{link}: a link to a device that is gone", f"rm {link}")


def _cgroups() -> Iterator[Leftover]:
    try:
        abandoned = abandoned_cgroups()
    except UnavailableError:
        return
    for cgroup in abandoned:
        pids = cgroup.pids()
        if pids:
            listed = " ".join(str(pid) for pid in pids[:20])
            yield Leftover(
                f"{cgroup.path}: {counted(len(pids), 'process')} of a job whose `infiniswap run` "
                "has ended",
                f"kill {listed}; rmdir {cgroup.path}",
            )
        else:
            yield Leftover(
                f"{cgroup.path}: the cgroup of a job that has ended", f"rmdir {cgroup.path}"
            )


def clear(paths: DevicePaths, spec: DeviceSpec | None = None) -> None:
    """Takes away what is left of a `run`'s device that has died; nothing when there is nothing.

    What was swapped out there can never be read again, and the kernel would go on filling the area.
    Jobs of runs that have died with the device are ended first, and then those of other runs that
    have anything swapped out: their memory may be there, too. A page that cannot be read is a fault
    to newer kernels; older ones hand out any bytes for it once the area is removed.

    Args:
        paths: of the device.
        spec: when it may have died before it wrote its record.

    Raises:
        ConflictError: the device runs, or somebody else is clearing it.
        InfiniswapError: something cannot be taken away.
    """
    spec = spec or rundir.read_record(paths)
    if spec is None or not spec.ephemeral:
        return
    lock = rundir.take_lock(paths)
    try:
        for cgroup in abandoned_cgroups():
            end_job(cgroup)
        for path in frontends.give_up(paths):
            if swap.find_area(path) is not None:
                _end_swapped_jobs()
                swap.swapoff(path, timeout_s=_SWAPOFF_S_MAX)
        frontends.clear_leftovers(paths)
        contents.delete(paths, spec)
        rundir.clear(paths)
    finally:
        os.close(lock)


def _end_swapped_jobs() -> None:
    for cgroup in find_job_cgroups():
        try:
            swapped_bytes = cgroup.memory().swap_bytes
        except InfiniswapError:
            continue  # it has just been removed
        if swapped_bytes != 0:
            cgroup.kill()
