# SPDX-License-Identifier: Apache-2.0
"""How much memory this host, or this container, has and has left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import SystemCallError, UnavailableError
from infiniswap.system.files import (
    PROC,
    parse_key_values,
    read_int,
    read_text,
    try_read_int,
    try_read_text,
)
from infiniswap.system.mounts import Mount, mounts
from infiniswap.units import PAGE_BYTES

UNLIMITED_BYTES = 1 << 62
"""Version 1 writes "no limit" as a number just below 2^63."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that can be used here.

    Attributes:
        total_bytes: all there is, or may be used.
        available_bytes: how much more can be used without swapping.
        limited_by: what sets the figures: "host", or the path of a memory cgroup.
    """

    total_bytes: int
    available_bytes: int
    limited_by: str


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Figures of one memory cgroup, its children included; None where the kernel has none.

    Attributes:
        limit_bytes: None without a limit.
        usage_bytes: anonymous memory, file cache, kernel memory.
        peak_bytes: the highest usage so far.
        anon_bytes: anonymous and shared memory in RAM: what can only go to swap.
        file_bytes: file cache that can be dropped or written back (not shared memory).
        swap_bytes: what of it is swapped out.
        oom_kills: processes that the kernel killed for want of memory since it was made, also for
            a limit above it, or for the host's memory.
        limit_ooms: how often its own limit left no way but to kill; version 2 only.
    """

    limit_bytes: int | None
    usage_bytes: int
    peak_bytes: int | None
    anon_bytes: int
    file_bytes: int
    swap_bytes: int | None
    oom_kills: int | None
    limit_ooms: int | None = None

    @property
    def available_bytes(self) -> int | None:
        """What more fits below the limit, None without one."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.usage_bytes + min(self.file_bytes, self.usage_bytes))


@dataclass(frozen=True, slots=True)
class Cache:
    """Page cache of the host or of one cgroup, in bytes.

    Attributes:
        file_bytes: what could be dropped or written back.
        refault_bytes: pages read again soon after they had been dropped, since the start.
    """

    file_bytes: int
    refault_bytes: int


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A tree of cgroups on this host: version 2's, or one of version 1.

    Attributes:
        version: 1 or 2.
        mount_point: the highest cgroup that is visible here.
        own: the cgroup of the process asked for.
        controllers: what it accounts and limits.
    """

    version: int
    mount_point: Path
    own: Path
    controllers: frozenset[str] = frozenset()


# -------------------------------------------------------------------------- host


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from /proc/meminfo; lines without a number are left out."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        fields = rest.split()
        if not colon or not fields or not fields[0].isdecimal():
            continue
        factor = 1024 if fields[1:] == ["kB"] else 1
        values[name] = int(fields[0]) * factor
    return values


def machine_memory(*, proc: Path = PROC) -> Memory:
    """The whole machine's memory, whatever cgroup the caller is in. Reserved huge pages are not
    part of it: no program gets them that does not ask for them.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    path = proc / "meminfo"
    values = parse_meminfo(read_text(path, "cannot read the memory figures"))
    try:
        available_bytes = values["MemAvailable"]
        # A container may be shown its own total beside the host's huge pages (lxcfs).
        total_bytes = max(available_bytes, values["MemTotal"] - values.get("Hugetlb", 0))
        return Memory(total_bytes, available_bytes, "host")
    except KeyError as error:
        raise SystemCallError(
            f"no {error.args[0]} in the memory figures", where=str(path)
        ) from None


def machine_cache(*, proc: Path = PROC) -> Cache | None:
    """The whole machine's page cache; None where the kernel does not count refaults of files.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    counters = parse_key_values(read_text(proc / "vmstat", "cannot read the memory counters"))
    refaults = counters.get("workingset_refault_file")  # Linux 5.9
    if refaults is None:
        return None
    file_pages = counters.get("nr_inactive_file", 0) + counters.get("nr_active_file", 0)
    return Cache(file_pages * PAGE_BYTES, refaults * PAGE_BYTES)


def cgroup_cache(path: Path, version: int) -> Cache | None:
    """The same of the memory cgroup whose directory is `path`.

    Raises:
        NotPermittedError, SystemCallError: not a memory cgroup, or gone.
    """
    stat = parse_key_values(read_text(path / "memory.stat", "cannot read the memory figures"))
    prefix = "" if version == 2 else "total_"
    refaults = stat.get(f"{prefix}workingset_refault_file")
    if refaults is None:
        return None
    file_bytes = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return Cache(file_bytes, refaults * PAGE_BYTES)


def host_memory(
    *, proc: Path = PROC, pid: int | None = None, hierarchy: Hierarchy | None = None
) -> Memory:
    """Memory that a process may use: the least of the machine's and of its cgroups'.

    MemAvailable knows nothing of a container's limit, and a limit nothing of the machine's other
    users, so both count. A cgroup's file cache counts as available, as it does in MemAvailable.

    Args:
        proc: root of the proc file system.
        pid: the process, None for the caller.
        hierarchy: of that process, when the caller knows it already.

    Raises:
        NotPermittedError, SystemCallError: /proc or a cgroup could not be read.
    """
    memory = machine_memory(proc=proc)
    total, available, limited_by = memory.total_bytes, memory.available_bytes, memory.limited_by
    try:
        hierarchy = hierarchy or memory_hierarchy(proc=proc, pid=pid)
    except UnavailableError:
        return memory
    for path in chain(hierarchy):
        # Most have no limit, and then nothing else of them matters.
        if cgroup_limit_bytes(path, hierarchy.version) is None:
            continue
        cgroup = cgroup_memory(path, hierarchy.version)
        if cgroup.limit_bytes is not None and cgroup.limit_bytes < total:
            total, limited_by = cgroup.limit_bytes, str(path)
        if cgroup.available_bytes is not None:
            available = min(available, cgroup.available_bytes)
    return Memory(total, min(available, total), limited_by)


# ----------------------------------------------------------------------- cgroups


def parse_process_cgroups(text: str) -> dict[str, str]:
    """Path by controller from /proc/PID/cgroup; version 2's is under ""."""
    paths: dict[str, str] = {}
    for line in text.split("\n"):
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def _visible(mount: Mount, path: str) -> Path:
    """The directory of cgroup `path`; in a container whose own cgroup is what is mounted, the
    path may start above what is visible, and then the mount point stands for it."""
    point = Path(mount.mount_point)
    root = mount.root.rstrip("/")
    if path != root and not path.startswith(root + "/"):
        return point
    parts = [part for part in path[len(root) :].split("/") if part]
    if ".." in parts:
        return point
    own = point.joinpath(*parts)
    return own if own.is_dir() else point


def hierarchies(*, proc: Path = PROC, pid: int | None = None) -> tuple[Hierarchy, ...]:
    """Every hierarchy that is mounted here, version 2 first.

    Args:
        proc: root of the proc file system.
        pid: whose own cgroups are meant; None: the caller's.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    who = "self" if pid is None else str(pid)
    text = read_text(proc / who / "cgroup", "cannot read the process's cgroups")
    paths = parse_process_cgroups(text)
    found: list[Hierarchy] = []
    for mount in mounts(proc=proc):
        point = Path(mount.mount_point)
        if mount.fs_type == "cgroup2" and "" in paths:
            names = (try_read_text(point / "cgroup.controllers") or "").split()
            found.append(Hierarchy(2, point, _visible(mount, paths[""]), frozenset(names)))
        elif mount.fs_type == "cgroup" and (here := mount.super_options & paths.keys()):
            own = _visible(mount, paths[min(here)])
            found.append(Hierarchy(1, point, own, frozenset(here)))
    return tuple(sorted(found, key=lambda hierarchy: -hierarchy.version))


def memory_hierarchy(*, proc: Path = PROC, pid: int | None = None) -> Hierarchy:
    """Where memory is accounted: version 2, or version 1 where 2 has no memory controller.

    Raises:
        UnavailableError: this kernel accounts memory in neither.
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    for hierarchy in hierarchies(proc=proc, pid=pid):
        if "memory" in hierarchy.controllers:
            return hierarchy
    raise UnavailableError(
        "no memory cgroups here: neither version 2 with a memory controller nor version 1 is "
        "mounted",
        mend="Boot with cgroup_enable=memory, or mount the memory controller.",
    )


def chain(hierarchy: Hierarchy) -> Iterator[Path]:
    """The process's own cgroup and those above it, as far as visible."""
    path = hierarchy.own
    while True:
        yield path
        if path in (hierarchy.mount_point, path.parent):
            return
        path = path.parent


def cgroup_limit_bytes(path: Path, version: int) -> int | None:
    """The memory limit of one cgroup, whatever those above it have; None without one.

    Raises:
        NotPermittedError, SystemCallError: not a memory cgroup, or gone.
    """
    # The root cgroup of version 2 has no such file.
    return try_read_int(path / "memory.max") if version == 2 else _limit_v1(path)


def _limit_v1(path: Path) -> int | None:
    limit = read_int(path / "memory.limit_in_bytes", "cannot read the memory limit")
    return None if limit >= UNLIMITED_BYTES else limit


def _usage_v2_root(stat: dict[str, int]) -> int:
    return sum(stat.get(name, 0) for name in ("anon", "file", "kernel", "sock"))


def _memory_v2(path: Path) -> CgroupMemory:
    stat = parse_key_values(read_text(path / "memory.stat", "cannot read the memory figures"))
    events = parse_key_values(try_read_text(path / "memory.events") or "")
    usage = try_read_int(path / "memory.current")
    return CgroupMemory(
        limit_bytes=try_read_int(path / "memory.max"),
        usage_bytes=_usage_v2_root(stat) if usage is None else usage,
        peak_bytes=try_read_int(path / "memory.peak"),
        anon_bytes=stat.get("anon", 0) + stat.get("shmem", 0),
        file_bytes=stat.get("inactive_file", 0) + stat.get("active_file", 0),
        swap_bytes=try_read_int(path / "memory.swap.current"),
        oom_kills=events.get("oom_kill"),
        limit_ooms=events.get("oom"),
    )


def _memory_v1(path: Path) -> CgroupMemory:
    stat = parse_key_values(read_text(path / "memory.stat", "cannot read the memory figures"))
    control = parse_key_values(try_read_text(path / "memory.oom_control") or "")
    return CgroupMemory(
        limit_bytes=_limit_v1(path),
        usage_bytes=read_int(path / "memory.usage_in_bytes", "cannot read the memory usage"),
        peak_bytes=try_read_int(path / "memory.max_usage_in_bytes"),
        anon_bytes=stat.get("total_rss", 0) + stat.get("total_shmem", 0),
        file_bytes=stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0),
        swap_bytes=stat.get("total_swap"),
        oom_kills=control.get("oom_kill"),
    )


def cgroup_needs(path: Path, version: int) -> int:
    """Bytes that the memory cgroup's processes have, in RAM and swapped out. What a process has
    given up (MADV_FREE) does not count: it is dropped, not paged out.

    Raises:
        NotPermittedError, SystemCallError: not a memory cgroup, or gone.
    """
    stat = parse_key_values(read_text(path / "memory.stat", "cannot read the memory figures"))
    prefix = "" if version == 2 else "total_"
    lists = ("inactive_anon", "active_anon", "unevictable")
    out_bytes = (
        try_read_int(path / "memory.swap.current") if version == 2 else stat.get("total_swap")
    )
    return sum(stat.get(f"{prefix}{name}", 0) for name in lists) + (out_bytes or 0)


def has_swap_limit(path: Path, version: int) -> bool:
    """Whether the memory cgroup, or one above it, may have only so much on swap areas."""
    if version == 1:
        limits = (try_read_int(each / "memory.memsw.limit_in_bytes") for each in _upwards(path))
        return any(limit is not None and limit < UNLIMITED_BYTES for limit in limits)
    return any(try_read_int(each / "memory.swap.max") is not None for each in _upwards(path))


def _upwards(path: Path) -> list[Path]:
    return [each for each in (path, *path.parents) if (each / "cgroup.procs").exists()]


def inactive_bytes(path: Path, version: int) -> int:
    """Bytes of the memory cgroup that the kernel would page out or drop first. Reading them makes
    it sum up what each processor has counted.

    Raises:
        NotPermittedError, SystemCallError: not a memory cgroup, or gone.
    """
    stat = parse_key_values(read_text(path / "memory.stat", "cannot read the memory figures"))
    prefix = "" if version == 2 else "total_"
    return sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_anon", "inactive_file"))


def cgroup_memory(path: Path, version: int) -> CgroupMemory:
    """Figures of the memory cgroup whose directory is `path`.

    Raises:
        NotPermittedError, SystemCallError: not a memory cgroup, or gone.
    """
    return _memory_v2(path) if version == 2 else _memory_v1(path)
