# SPDX-License-Identifier: Apache-2.0
"""Which memory limit a process was killed for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import InfiniswapError
from infiniswap.system.files import PROC
from infiniswap.system.memory import cgroup_memory, chain
from infiniswap.system.surroundings.groups import groups_of
from infiniswap.units import format_size_short


@dataclass(frozen=True, slots=True)
class _Count:
    path: Path
    version: int
    kills: int


class KillWatch:
    """Remembers how many processes the kernel has killed in the memory cgroups of a process, which
    may be gone when its death is to be explained.

    Args:
        pid: the process.
        proc: root of the proc file system.
    """

    def __init__(self, pid: int, *, proc: Path = PROC) -> None:
        self._counts = tuple(
            _Count(path, hierarchy.version, kills)
            for hierarchy in groups_of(pid, proc=proc)
            if "memory" in hierarchy.controllers
            for path in chain(hierarchy)
            if (kills := _kills(path, hierarchy.version)) is not None
        )

    def cause(self) -> str:
        """The limit for which the kernel has killed since, as `the memory limit of PATH (SIZE)`;
        empty: it has killed nothing there."""
        if not any(
            (_kills(count.path, count.version) or 0) > count.kills for count in self._counts
        ):
            return ""
        for count in self._counts:
            try:
                limit = cgroup_memory(count.path, count.version).limit_bytes
            except InfiniswapError:
                continue
            if limit is not None:
                return f"the memory limit of {count.path} ({format_size_short(limit)})"
        return "lack of memory on this host"


def _kills(path: Path, version: int) -> int | None:
    try:
        return cgroup_memory(path, version).oom_kills
    except InfiniswapError:
        return None
