# SPDX-License-Identifier: Apache-2.0
"""What still limits a service: said by its start, by `show` and by doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap.system.files import PROC, try_read_int, try_read_text
from infiniswap.system.memory import chain
from infiniswap.system.process import Degraded
from infiniswap.system.surroundings.groups import (
    foreign_groups,
    groups_of,
    homes,
    is_in_unit,
)
from infiniswap.system.surroundings.limits import (
    ADDRESSES,
    DATA,
    FILE,
    ULIMITS,
    memory_limits,
    task_limits,
)
from infiniswap.units import format_size_short

_BYTES: Final = (ADDRESSES, DATA, FILE)

NAME: Final = "starter"
"""Name of every finding here: something that the service has inherited from its starter."""


def in_force(pid: int, *, proc: Path = PROC) -> tuple[Degraded, ...]:
    """Everything that holds for a process now and might hinder a device."""
    found = (*_session(pid, proc), *_group_limits(pid, proc))
    return (*(Degraded(NAME, what, mend) for what, mend in found), *of_process(pid))


def of_process(pid: int) -> tuple[Degraded, ...]:
    """Likewise, without the limits of cgroups: a donor sizes its pool by them."""
    found = (*_ulimits(pid), *_processors(pid), *_priority(pid))
    return tuple(Degraded(NAME, what, mend) for what, mend in found)


def would_stay(pid: int, *, leaves: bool, proc: Path = PROC) -> tuple[Degraded, ...]:
    """Finds what would still limit a service that a process starts.

    Args:
        pid: the process.
        leaves: it may move a service to another cgroup (infiniswap.system.surroundings.leave).
        proc: root of the proc file system.
    """
    if not leaves or is_in_unit(pid, proc=proc):
        return in_force(pid, proc=proc)
    home = 1 if homes(proc=proc) else pid
    found = (*_group_limits(home, proc), *_ulimits(pid), *_processors(pid))
    return tuple(Degraded(NAME, what, mend) for what, mend in found)


def _session(pid: int, proc: Path) -> Iterator[tuple[str, str]]:
    for hierarchy, home in foreign_groups(pid, proc=proc):
        yield (
            f"process {pid} is in {hierarchy.own}, which is not a cgroup for services; whoever "
            "limits, freezes or kills that does so to the device",
            f"As root: echo {pid} > {home}/cgroup.procs.",
        )


def _group_limits(pid: int, proc: Path) -> Iterator[tuple[str, str]]:
    for limited in memory_limits(pid, proc=proc):
        size, room = format_size_short(limited.limit), format_size_short(limited.room)
        yield (
            f"the cgroup {limited.path} may have {size} of memory, of which {room} are free",
            "The kernel kills the processes of the device where that is not enough.",
        )
    for limited in task_limits(pid, proc=proc):
        yield (
            f"the cgroup {limited.path} may have {limited.limit} threads, of which "
            f"{limited.used} are there",
            "Without room for a successor's threads nothing takes over.",
        )
    for hierarchy in groups_of(pid, proc=proc):
        for path in chain(hierarchy):
            share = _processor_share(path, hierarchy.version)
            if share:
                yield (
                    f"the cgroup {path} may use {share}; page-ins wait while it is used up",
                    "Raise it (a container's --cpus, a unit's CPUQuota=).",
                )


def _processor_share(path: Path, version: int) -> str:
    if version == 2:
        if (try_read_text(path / "cpu.idle") or "").strip() == "1":
            return "only processors that nobody else wants (cpu.idle)"
        quota, _, period = (try_read_text(path / "cpu.max") or "max").strip().partition(" ")
    else:
        quota = (try_read_text(path / "cpu.cfs_quota_us") or "-1").strip()
        period = str(try_read_int(path / "cpu.cfs_period_us") or 0)
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return ""
    return f"{int(quota) / int(period):.2g} processors"


def _ulimits(pid: int) -> Iterator[tuple[str, str]]:
    for limit in ULIMITS:
        try:
            value = limit.value(pid)
        except OSError:
            return
        if value is not None:
            size = format_size_short(value) if limit in _BYTES else str(value)
            yield (
                f"the limit on {limit.what} is {size} (ulimit {limit.option})",
                "Start it from a shell without that limit.",
            )


def _processors(pid: int) -> Iterator[tuple[str, str]]:
    try:
        allowed = os.sched_getaffinity(pid)
    except OSError:
        return
    online = os.cpu_count() or 0
    if len(allowed) < online:
        yield (
            f"it may run on {len(allowed)} of {online} processors "
            f"({', '.join(map(str, sorted(allowed)[:16]))}), as its starter: its threads and "
            "whatever else runs there wait for each other, page-ins and page-outs with them",
            "Start it from a shell without `taskset` or a cpuset.",
        )


def _priority(pid: int) -> Iterator[tuple[str, str]]:
    try:
        nice, policy = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
    except OSError:
        return
    if nice > 0 or policy == os.SCHED_IDLE:
        how = "runs only when processors are idle" if policy == os.SCHED_IDLE else f"nice {nice}"
        yield f"it gives way to other programs ({how})", f"Run: renice 0 {pid}; chrt -o -p 0 {pid}."
