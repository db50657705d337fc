# SPDX-License-Identifier: Apache-2.0
"""Limits that a process would escape by leaving its cgroups.

A process of another user that we put into a cgroup of our own must not escape a limit that an
administrator has set on that user. So a memory limit above also binds the new cgroup, and any other
limit that the process would leave behind is a reason to refuse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from infiniswap.errors import NotPermittedError
from infiniswap.system.cgroup import RUN_PREFIX
from infiniswap.system.files import PROC, try_read_text
from infiniswap.system.memory import (
    UNLIMITED_BYTES,
    MemoryHierarchy,
    cgroup_limit_bytes,
    chain,
    memory_hierarchy,
)

_RUNS: Final = (RUN_PREFIX, RUN_PREFIX.replace("-", "_"))
"""How cgroups of runs' jobs begin, made by us or by systemd."""
_V2_OTHERS: Final = (
    "memory.high",
    "memory.swap.max",
    "memory.zswap.max",
    "pids.max",
    "cpu.max",
    "cpuset.cpus",
    "cpuset.mems",
    "io.max",
)
_OF_RUNS: Final = "memory.zswap.max"
"""Each job of a run has one of its own, as a part of its memory limit."""
_V1_OTHERS: Final = ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")


def memory_allowed_bytes(pid: int, *, proc: Path = PROC) -> int | None:
    """The least memory limit that holds for a process; None without one.

    Raises:
        UnavailableError, NotPermittedError, SystemCallError: the cgroups cannot be read.
    """
    hierarchy = memory_hierarchy(proc=proc, pid=pid)
    limits = [cgroup_limit_bytes(path, hierarchy.version) for path in chain(hierarchy)]
    return min((limit for limit in limits if limit is not None), default=None)


def check_leaves_no_limit(
    pid: int, stays: Path, *, carries_tasks: bool = False, proc: Path = PROC
) -> int | None:
    """Looks at the cgroups that a process is in and would leave.

    Args:
        pid: the process.
        stays: the lowest cgroup that it is in and would stay in.
        carries_tasks: a limit on tasks is no obstacle, as the new cgroup gets it.
        proc: root of the proc file system.

    Returns:
        The least limit on tasks that would be left behind; None: there is none.

    Raises:
        NotPermittedError: one of them has a limit other than on memory.
        UnavailableError, SystemCallError: the cgroups cannot be read.
    """
    hierarchy = memory_hierarchy(proc=proc, pid=pid)
    tasks: list[int] = []
    for path in left(hierarchy, stays):
        for name in _V2_OTHERS if hierarchy.version == 2 else _V1_OTHERS:
            value = (try_read_text(path / name) or "").strip()
            if not _is_limit(value) or (name == _OF_RUNS and is_of_run(path)):
                continue
            if carries_tasks and name == "pids.max":
                tasks.append(int(value))
                continue
            raise NotPermittedError(
                f"this process is under a limit ({name}: {value}) that its job would escape",
                where=str(path),
                mend="Start it from where there is no such limit, or have it run by root.",
            )
    return min(tasks, default=None)


def is_of_run(path: Path) -> bool:
    """Whether a cgroup is that of a run's job, or within it."""
    return any(part.startswith(_RUNS) for part in path.parts)


def left(hierarchy: MemoryHierarchy, stays: Path) -> tuple[Path, ...]:
    """The process's own cgroup and those above it, below `stays`."""
    return tuple(path for path in chain(hierarchy) if path != stays and stays in path.parents)


def _is_limit(value: str) -> bool:
    if value.isdecimal():
        return int(value) < UNLIMITED_BYTES
    return bool(value) and not value.startswith("max")
