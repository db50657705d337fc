# SPDX-License-Identifier: Apache-2.0
"""Limits that a process would escape by leaving its cgroups.

A process of another user that we put into a cgroup of our own must not escape a limit that an
administrator has set on that user. So a memory limit above also binds the new cgroup, and any other
limit that the process would leave behind is a reason to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap.errors import NotPermittedError
from infiniswap.system.cgroup import RUN_PREFIX
from infiniswap.system.files import PROC, try_read_int, try_read_text
from infiniswap.system.memory import (
    UNLIMITED_BYTES,
    Hierarchy,
    cgroup_limit_bytes,
    chain,
    memory_hierarchy,
)

_RUNS: Final = (RUN_PREFIX, RUN_PREFIX.replace("-", "_"))
"""How cgroups of runs' jobs begin, made by us or by systemd."""
_V2_OTHERS: Final = (
    "memory.high",
    "memory.swap.high",
    "memory.swap.max",
    "memory.zswap.max",
    "pids.max",
    "cpu.max",
    "cpuset.cpus",
    "cpuset.mems",
)
_V2_KEYED: Final = ("io.max", "rdma.max", "misc.max", "dmem.max")
"""A line for each device or resource: its name, and then values or `what=value`."""
_V2_HUGE: Final = "hugetlb.*.max"
"""For each size of huge pages, what is used and what is reserved."""
_OF_RUNS: Final = "memory.zswap.max"
"""Each job of a run has one of its own, as a part of its memory limit."""
_V1_OTHERS: Final = (
    "memory.memsw.limit_in_bytes",
    "memory.kmem.limit_in_bytes",
    "memory.kmem.tcp.limit_in_bytes",
)


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
        for name, value in _limits(path, hierarchy.version):
            if carries_tasks and name == "pids.max":
                tasks.append(int(value))
            elif name != _OF_RUNS or not is_of_run(path):
                raise _escapes(path, name, value)
    return min(tasks, default=None)


def check_may_enter(pid: int, job: Path, *, proc: Path = PROC) -> None:
    """Looks at the cgroups that a process would leave for that of a job which another process of
    its user has begun: the same rules as for who begins one.

    Args:
        pid: the process.
        job: the job's cgroup.
        proc: root of the proc file system.

    Raises:
        NotPermittedError: one of them has a limit other than on memory, which the job's lacks.
        UnavailableError, SystemCallError: the cgroups cannot be read.
    """
    top = memory_hierarchy(proc=proc, pid=pid).mount_point
    tasks = check_leaves_no_limit(pid, top, carries_tasks=True, proc=proc)
    of_job = try_read_int(job / "pids.max")
    if tasks is not None and (of_job is None or of_job > tasks):
        raise _escapes(job, "pids.max", str(tasks))


def _escapes(path: Path, name: str, value: str) -> NotPermittedError:
    return NotPermittedError(
        f"this process is under a limit ({name}: {value}) that its job would escape",
        where=str(path),
        mend="Start it from where there is no such limit, or have it run by root.",
    )


def is_of_run(path: Path) -> bool:
    """Whether a cgroup is that of a run's job, or within it."""
    return any(part.startswith(_RUNS) for part in path.parts)


def left(hierarchy: Hierarchy, stays: Path) -> tuple[Path, ...]:
    """The process's own cgroup and those above it, below `stays`."""
    return tuple(path for path in chain(hierarchy) if path != stays and stays in path.parents)


def _limits(path: Path, version: int) -> Iterator[tuple[str, str]]:
    """Limits of one cgroup other than that on memory: file and value. Weights (cpu.weight,
    io.weight, cpu.uclamp.max, ...) and eBPF programs are no limits: docs/service.md."""
    names: tuple[str, ...] = _V1_OTHERS
    if version == 2:
        names = (*_V2_OTHERS, *sorted(file.name for file in path.glob(_V2_HUGE)))
        for name in _V2_KEYED:
            for line in (try_read_text(path / name) or "").splitlines():
                if any(word.rpartition("=")[2] != "max" for word in line.split()[1:]):
                    yield name, line.strip()
    for name in names:
        value = (try_read_text(path / name) or "").strip()
        if _is_limit(value):
            yield name, value


def _is_limit(value: str) -> bool:
    if value.isdecimal():
        return int(value) < UNLIMITED_BYTES
    return bool(value) and not value.startswith("max")
