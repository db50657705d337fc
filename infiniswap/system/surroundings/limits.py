# SPDX-License-Identifier: Apache-2.0
"""Limits, compared with what a service needs before anything depends on it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import InfiniswapError, MemoryLimitError, UnavailableError
from infiniswap.system.files import PROC, try_read_int, try_read_text
from infiniswap.system.memory import UNLIMITED_BYTES, Hierarchy, cgroup_memory, chain
from infiniswap.system.process import status_fields
from infiniswap.system.surroundings.groups import groups_of
from infiniswap.units import MIB, format_size_short

_RAISED: Final = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_RTTIME,
    resource.RLIMIT_SIGPENDING,
)
"""Those whose soft limit becomes the hard one. Not the stack's, which a service does not outgrow:
without a limit the kernel lays out its memory in another way."""

_RESERVE_BYTES: Final = 16 * MIB
"""Beside what the processes have when they begin to serve: buffers of connections, page tables, and
the programs that they start."""
_RESERVE_TASKS: Final = 16


# ---------------------------------------------------------------------------- ulimits


def raise_limits(pid: int = 0) -> None:
    """Raises soft limits to the hard ones. As in the units, a process and the programs that it
    starts may also lock memory and have real-time threads of the lowest priority, so that it takes
    no capability. Where limits may not be raised they stay.

    Args:
        pid: the process; 0: the caller.
    """
    for limit in _RAISED:
        _raise(pid, limit, resource.RLIM_INFINITY, is_hard=False)
    _raise(pid, resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    _raise(pid, resource.RLIMIT_RTPRIO, 1)


def _raise(pid: int, limit: int, wanted: int, *, is_hard: bool = True) -> None:
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.prlimit(pid, limit)
        if not is_hard:
            wanted = hard
        if not _holds(soft, wanted):
            hard = hard if _holds(hard, wanted) else wanted
            resource.prlimit(pid, limit, (wanted, hard))


def _holds(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or 0 <= wanted <= limit


@dataclass(frozen=True, slots=True)
class Ulimit:
    """A hard limit that ends or hinders a service, as a shell sets it."""

    limit: int
    option: str
    what: str

    def value(self, pid: int = 0) -> int | None:
        """None: unlimited."""
        hard = resource.prlimit(pid, self.limit)[1]
        return None if hard == resource.RLIM_INFINITY else hard


CPU: Final = Ulimit(resource.RLIMIT_CPU, "-t", "seconds of processor time")
FILE: Final = Ulimit(resource.RLIMIT_FSIZE, "-f", "the size of a file")
ADDRESSES: Final = Ulimit(resource.RLIMIT_AS, "-v", "address space")
DATA: Final = Ulimit(resource.RLIMIT_DATA, "-d", "private memory")
REAL_TIME: Final = Ulimit(resource.RLIMIT_RTTIME, "-R", "microseconds of real-time threads")
ULIMITS: Final = (CPU, FILE, ADDRESSES, DATA, REAL_TIME)


def check_ulimits(*, file_bytes: int, memory_bytes: int) -> None:
    """Compares this process's hard limits, which a service inherits, with what the service needs.

    Args:
        file_bytes: its largest file.
        memory_bytes: what it maps at most.

    Raises:
        UnavailableError: one of them is too low; both figures.
    """
    if (seconds := CPU.value()) is not None:
        raise _too_low(CPU, f"{seconds} s", "unlimited", "the kernel would kill it after that time")
    for limit, needed in ((FILE, file_bytes), (ADDRESSES, memory_bytes), (DATA, memory_bytes)):
        allowed = limit.value()
        if allowed is not None and allowed < needed:
            raise _too_low(limit, format_size_short(allowed), format_size_short(needed), "")


def _too_low(limit: Ulimit, allowed: str, needed: str, why: str) -> UnavailableError:
    because = f": {why}" if why else ""
    return UnavailableError(
        f"the limit on {limit.what} here is {allowed}, and the process needs {needed}{because}",
        where=f"ulimit -H {limit.option}",
        mend=f"Start it from a shell without that limit: as root, ulimit {limit.option} unlimited. "
        "(Limits of logins are in /etc/security/limits.conf, those of a unit are its Limit... "
        "keys.)",
    )


# ------------------------------------------------------------------------ cgroup limits


@dataclass(frozen=True, slots=True)
class Limited:
    """A limit of a cgroup: its path, what the limit is, and what all in there have."""

    path: Path
    limit: int
    used: int

    @property
    def room(self) -> int:
        """What more fits."""
        return max(0, self.limit - self.used)


def memory_limits(pid: int, *, proc: Path = PROC) -> Iterator[Limited]:
    """Yields the memory limits of a process's cgroup and of all above it; file cache is free."""
    for hierarchy, path in _chains(pid, "memory", proc):
        try:
            figures = cgroup_memory(path, hierarchy.version)
        except InfiniswapError:
            continue
        limits = [figures.limit_bytes]
        if hierarchy.version == 2:
            limits.append(try_read_int(path / "memory.high"))  # above it all in there are slowed
        found = [limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES]
        if found:
            used = figures.usage_bytes - min(figures.file_bytes, figures.usage_bytes)
            yield Limited(path, min(found), used)


def task_limits(pid: int, *, proc: Path = PROC) -> Iterator[Limited]:
    """Yields the limits on processes and threads of a process's cgroup and of all above it."""
    for _, path in _chains(pid, "pids", proc):
        limit = try_read_int(path / "pids.max")
        if limit is not None:
            yield Limited(path, limit, try_read_int(path / "pids.current") or 0)


def _chains(pid: int, controller: str, proc: Path) -> Iterator[tuple[Hierarchy, Path]]:
    for hierarchy in groups_of(pid, proc=proc):
        if controller in hierarchy.controllers:
            for path in chain(hierarchy):
                yield hierarchy, path


@dataclass(frozen=True, slots=True)
class Has:
    """Footprint of a process that is ready to serve: private memory, memory that it shares with
    other processes of the device, and threads."""

    own_bytes: int
    shared_bytes: int
    threads: int


def has(pid: int, *, proc: Path = PROC) -> Has:
    """Reads the footprint of a process; zeros if there is no such process."""
    text = try_read_text(proc / str(pid) / "status") or ""

    def number(name: str) -> int:
        value = status_fields(text, name)[:1] or ["0"]
        return int(value[0]) if value[0].isdecimal() else 0

    shared_kib = number("RssFile") + number("RssShmem")  # its programs and the state file
    return Has(number("RssAnon") * 1024, shared_kib * 1024, number("Threads"))


def check_room(pid: int, more: int, *, proc: Path = PROC) -> None:
    """Checks that all cgroups above a process have room for others of its kind beside it.

    Args:
        pid: a process that has all its memory and threads.
        more: how many others there are going to be.
        proc: root of the proc file system.

    Raises:
        MemoryLimitError, UnavailableError: one has not; both figures.
    """
    one = has(pid, proc=proc)
    needs_bytes = more * one.own_bytes + _RESERVE_BYTES
    for limited in memory_limits(pid, proc=proc):
        if limited.room < needs_bytes:
            own = one.own_bytes + one.shared_bytes
            all_bytes = own + needs_bytes
            others = max(0, limited.used - own)
            used = f", of which other processes have {format_size_short(others)}" if others else ""
            raise MemoryLimitError(
                f"{1 + more} processes of the device need {format_size_short(all_bytes)} of "
                f"memory, and this cgroup may have {format_size_short(limited.limit)}{used}",
                where=str(limited.path),
                mend="Raise that limit (a container's --memory, a unit's MemoryMax= and "
                "MemoryHigh=), or start the device from outside.",
            )
    needs_tasks = more * one.threads + _RESERVE_TASKS
    for limited in task_limits(pid, proc=proc):
        if limited.room < needs_tasks:
            raise UnavailableError(
                f"{1 + more} processes of the device need {one.threads + needs_tasks} threads, and "
                f"this cgroup may have {limited.limit}, of which other processes have "
                f"{max(0, limited.used - one.threads)}",
                where=f"{limited.path}/pids.max",
                mend="Raise that limit (a container's --pids-limit, a unit's TasksMax=), or start "
                "the device from outside.",
            )
