# SPDX-License-Identifier: Apache-2.0
"""Memory figures for the pool: the whole host's (or container's), or those of one cgroup."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infiniswap.errors import ConfigError, InfiniswapError, UnavailableError
from infiniswap.system.memory import (
    Cache,
    Hierarchy,
    Memory,
    cgroup_cache,
    cgroup_memory,
    host_memory,
    machine_cache,
    machine_memory,
    memory_hierarchy,
)

_HIERARCHY_S = 60.0
"""How long the paths of this process's cgroups are reused: the figures are read every second, and
a daemon is hardly ever moved."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of the host, or of the cgroup that bounds the daemon, in bytes."""

    total_bytes: int
    available_bytes: int


class MemorySource(Protocol):
    """Reads the figures. Methods block for a moment: for a worker thread."""

    @property
    def name(self) -> str:
        """For status: "host", or the path of a cgroup."""

    def read(self) -> MemoryFigures:
        """Raises InfiniswapError."""

    def cache(self) -> Cache | None:
        """None where this kernel does not count refaults. Raises InfiniswapError."""


class HostMemorySource:
    """Memory that this process may use: the machine's, or less inside a container."""

    def __init__(self) -> None:
        self._name = "host"
        self._limit: Path | None = None
        self._hierarchy: Hierarchy | None = None
        self._found_s = float("-inf")

    @property
    def name(self) -> str:
        """What limits the figures: "host", or the path of a cgroup."""
        return self._name

    def read(self) -> MemoryFigures:
        """Blocking. Raises InfiniswapError."""
        now_s = time.monotonic()
        if now_s - self._found_s >= _HIERARCHY_S:
            self._found_s = now_s
            try:
                self._hierarchy = memory_hierarchy()
            except UnavailableError:
                self._hierarchy = None
        try:
            memory = self._figures()
        except InfiniswapError:
            self._found_s = float("-inf")  # moved, perhaps: looked for again next time
            raise
        self._name = memory.limited_by[:128]
        self._limit = None if memory.limited_by == "host" else Path(memory.limited_by)
        return MemoryFigures(memory.total_bytes, memory.available_bytes)

    def cache(self) -> Cache | None:
        """Blocking. Raises InfiniswapError. Of whatever limits the figures."""
        if self._limit is not None and self._hierarchy is not None:
            return cgroup_cache(self._limit, self._hierarchy.version)
        return machine_cache()

    def _figures(self) -> Memory:
        if self._hierarchy is None:
            return machine_memory()
        return host_memory(hierarchy=self._hierarchy)


class CgroupMemorySource:
    """The memory of one cgroup, which must have a limit; never more than the host has left.

    The daemon must run in that cgroup (or below it), so that its slabs are counted there.

    Args:
        path: directory of the cgroup.
        version: of the cgroup hierarchy, 1 or 2.
    """

    def __init__(self, path: Path, version: int) -> None:
        self._path = path
        self._version = version

    @property
    def name(self) -> str:
        """The path, its end if it is long."""
        return str(self._path)[-128:]

    def read(self) -> MemoryFigures:
        """Blocking. Raises InfiniswapError; ConfigError when the cgroup has no limit."""
        cgroup = cgroup_memory(self._path, self._version)
        available = cgroup.available_bytes
        if cgroup.limit_bytes is None or available is None:
            raise ConfigError(
                "this memory cgroup has no limit",
                where=f"--memory-cgroup {self._path}",
                mend="Set one, or leave the option out to use the host's figures.",
            )
        host = host_memory()
        return MemoryFigures(
            min(cgroup.limit_bytes, host.total_bytes), min(available, host.available_bytes)
        )

    def cache(self) -> Cache | None:
        """Blocking. Raises InfiniswapError."""
        return cgroup_cache(self._path, self._version)


def memory_source(cgroup: Path | None) -> MemorySource:
    """The figures to use.

    Args:
        cgroup: a memory cgroup, as a directory or as /proc/PID/cgroup writes it; None: the host.

    Raises:
        ConfigError: there is no such memory cgroup.
        UnavailableError: this kernel has none at all.
    """
    if cgroup is None:
        return HostMemorySource()
    try:
        hierarchy = memory_hierarchy()
    except UnavailableError as error:
        error.where = f"--memory-cgroup {cgroup}"
        raise
    below = hierarchy.mount_point / str(cgroup).lstrip("/")
    for path in (cgroup, below):
        if (path / "memory.stat").exists():
            return CgroupMemorySource(path, hierarchy.version)
    raise ConfigError(
        "no such memory cgroup",
        where=f"--memory-cgroup {cgroup}",
        mend=f"Give a directory below {hierarchy.mount_point}.",
    )
