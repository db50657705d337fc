# SPDX-License-Identifier: Apache-2.0
"""Where a job's memory cgroup is made, and by whom.

Without systemd, and on version 1, we make it ourselves (infiniswap.system.cgroup). Under systemd
version 2's hierarchy belongs to that: it is asked, over D-Bus, for a transient slice with the
limit, and for a transient scope in it when the job's first process enters. A slice of its own,
not the scope alone, because a scope vanishes with its last process, and with it the figures that
tell why that ended.

Every job goes to the top, so that no limit above runs out before its own. A member's job, too, and
not into the member's slice: for whatever is in there by its name (`user-1000-...`) systemd's
`user-.slice.d` holds, which ends a slice in which nothing runs yet, and may limit its memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from infiniswap.errors import (
    InfiniswapError,
    NotFoundError,
    UnavailableError,
)
from infiniswap.system import systemd
from infiniswap.system.cgroup import (
    RUN_PREFIX,
    MemoryCgroup,
    create_memory_cgroup,
    find_run_cgroups,
)
from infiniswap.system.cgroup_limits import check_leaves_no_limit
from infiniswap.system.files import PROC, try_read_text, try_write_text
from infiniswap.system.memory import (
    Hierarchy,
    Memory,
    host_memory,
    machine_memory,
    memory_hierarchy,
)
from infiniswap.system.programs import run_command

_ZSWAP_SHARE_MAX: Final = 0.4
"""Of a job's limit, for zswap's pool, which counts against it. With the kernel's default, no bound,
the pool fills the whole limit, and the kernel kills the job though there is swap space left (seen
with 6.12)."""
_SLICE = re.compile(r"infiniswap_run_(\d+)_(\d+)\.slice", re.ASCII)


@dataclass(frozen=True, slots=True)
class SliceCgroup(MemoryCgroup):
    """A job's cgroup that is a slice of systemd's."""

    @property
    def name(self) -> str:
        """What the cgroup would be called without systemd."""
        match = _SLICE.fullmatch(self.path.name)
        return self.path.name if match is None else f"{RUN_PREFIX}{match[1]}-{match[2]}"

    def add(self, pid: int) -> None:
        """Moves a process into it, as MemoryCgroup.add does.

        Raises:
            NotFoundError: no such process.
            SystemCallError, DeadlineError: systemd refused, or took too long.
        """
        scope = self.path / self.path.name.replace(".slice", ".scope")
        if scope.is_dir():
            MemoryCgroup(scope, self.version).add(pid)
            return
        systemd.start_unit(
            scope.name,
            "Slice s " + self.path.name,
            f"PIDs au 1 {pid}",
            # systemd does not end a delegated unit when the kernel has killed one of its processes
            # for lack of memory; `run` leaves it to the job to react.
            "Delegate b true",
            "CollectMode s inactive-or-failed",
        )
        systemd.wait_until(
            lambda: pid in self.pids() or not _lives(pid), f"process {pid} in {scope.name}"
        )
        if pid not in self.pids():
            raise NotFoundError(f"there is no process {pid}")

    def remove(self, *, timeout_s: float = 10.0) -> None:
        """Removes it; it must be empty. Nothing to do when it is gone.

        Raises:
            SystemCallError, DeadlineError: systemd refused, or took too long.
        """
        if not self.path.exists():
            return
        run_command(["systemctl", "stop", "--quiet", self.path.name], timeout_s=systemd.WAIT_S_MAX)
        systemd.wait_until(lambda: not self.path.exists(), f"the end of {self.path.name}")


def _lives(pid: int) -> bool:
    return (PROC / str(pid)).exists()


def memory_for_jobs(*, proc: Path = PROC) -> Memory:
    """What bounds every job, as all of them are made at the top: the machine's memory, or a
    container's limit.

    Raises:
        NotPermittedError, SystemCallError: /proc or a cgroup could not be read.
    """
    try:
        hierarchy = memory_hierarchy(proc=proc)
    except UnavailableError:
        return machine_memory(proc=proc)
    return host_memory(proc=proc, hierarchy=replace(hierarchy, own=hierarchy.mount_point))


# ---------------------------------------------------------------------------- making


def systemd_makes_them(*, proc: Path = PROC) -> bool:
    """Whether jobs' cgroups are made and removed by systemd; also where there are none."""
    try:
        return _is_systemds(memory_hierarchy(proc=proc))
    except InfiniswapError:
        return True


def _is_systemds(hierarchy: Hierarchy) -> bool:
    return hierarchy.version == 2 and systemd.has_bus()


def create_job_cgroup(
    name: str, limit_bytes: int, *, member_pid: int | None = None, proc: Path = PROC
) -> MemoryCgroup:
    """Makes an empty cgroup for a job, with a memory limit and unlimited swap; zswap may have a
    part of the limit.

    Args:
        name: from run_cgroup_name.
        limit_bytes: of memory.
        member_pid: the `run` of a member, whose limits must hold for the job, too.
        proc: root of the proc file system.

    Raises:
        NotPermittedError: the job would escape a limit of the member's.
        Others: see create_memory_cgroup.
    """
    hierarchy = memory_hierarchy(proc=proc, pid=member_pid)
    top, by_systemd = hierarchy.mount_point, _is_systemds(hierarchy)
    tasks = None
    if member_pid is not None:
        tasks = check_leaves_no_limit(member_pid, top, carries_tasks=by_systemd, proc=proc)
    if by_systemd:
        cgroup: MemoryCgroup = _create_slice(slice_name(name), limit_bytes, top, tasks)
    else:
        cgroup = create_memory_cgroup(name, limit_bytes, proc=proc)
    if cgroup.version == 2:  # not there before Linux 5.19
        pool_bytes = int(limit_bytes * _ZSWAP_SHARE_MAX)
        try_write_text(cgroup.path / "memory.zswap.max", str(pool_bytes))
    return cgroup


def slice_name(name: str) -> str:
    """A job's slice. In slices' names `-` stands between parent and child, so ours has none."""
    return f"infiniswap_run_{name.removeprefix(RUN_PREFIX).replace('-', '_')}.slice"


def _create_slice(unit: str, limit_bytes: int, top: Path, tasks: int | None) -> SliceCgroup:
    cgroup = SliceCgroup(top / unit, 2)
    systemd.start_unit(
        unit,
        f"MemoryMax t {limit_bytes}",
        "MemoryAccounting b true",
        "CollectMode s inactive-or-failed",
        *(() if tasks is None else (f"TasksMax t {tasks}",)),
    )
    try:
        limit = cgroup.path / "memory.max"
        systemd.wait_until(
            lambda: (try_read_text(limit) or "max").strip() != "max", f"{unit} with its limit"
        )
    except InfiniswapError:
        run_command(["systemctl", "stop", "--quiet", unit], timeout_s=systemd.WAIT_S_MAX)
        raise
    return cgroup


# --------------------------------------------------------------------------- finding


def find_job_cgroups(*, proc: Path = PROC) -> tuple[MemoryCgroup, ...]:
    """Every job's cgroup there is, whoever made it.

    Raises:
        UnavailableError: no memory cgroups on this host.
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    hierarchy = memory_hierarchy(proc=proc)
    paths = sorted(hierarchy.mount_point.glob("*.slice")) if hierarchy.version == 2 else ()
    slices = (SliceCgroup(path, 2) for path in paths if _SLICE.fullmatch(path.name))
    return (*find_run_cgroups(proc=proc), *slices)
