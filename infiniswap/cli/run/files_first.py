# SPDX-License-Identifier: Apache-2.0
"""The swappiness of a job with far memory, where cgroups are of version 1."""

from __future__ import annotations

import time

from infiniswap.system.cgroup import FILES_FIRST, SWAPPINESS, MemoryCgroup
from infiniswap.units import MIB

_WAIT_S = 2.0
"""A change must last this long: the figure of far memory is up to a second old."""
_SWAPPED_BYTES = 64 * MIB
"""The kernel swaps out some memory of programs without far memory in any case."""


class FilesFirst:
    """Makes the kernel take page cache before the program's memory while far memory is in use.

    Otherwise the kernel swaps out what far memory would take. If much more of the job is in swap
    than far, swappiness is that of a job without far memory. Version 2 has no swappiness: there the
    agents reclaim files (csrc/far/budget.c).

    Args:
        cgroup: of the job.
        wanted: whether the job can have far memory.
    """

    def __init__(self, cgroup: MemoryCgroup, *, wanted: bool) -> None:
        self._cgroup = cgroup
        self._wanted = wanted and cgroup.version == 1
        self._first = False
        self._agreed_s = time.monotonic()
        if self._wanted:
            self._set(first=True)

    def look(self, far_bytes: int, swapped_bytes: int) -> None:
        """Adjusts the swappiness to what is in swap. Call it several times a second.

        Args:
            far_bytes: far memory of the job; 0 where that is left to swap now.
            swapped_bytes: memory of the job in swap.
        """
        now_s = time.monotonic()
        first = far_bytes + _SWAPPED_BYTES >= swapped_bytes
        if first == self._first:
            self._agreed_s = now_s
        elif self._wanted and now_s - self._agreed_s > _WAIT_S:
            self._set(first=first)

    def _set(self, *, first: bool) -> None:
        self._first = first
        self._cgroup.set_swappiness(FILES_FIRST if first else SWAPPINESS)
