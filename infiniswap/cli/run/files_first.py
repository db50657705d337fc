# SPDX-License-Identifier: Apache-2.0
"""Which of a job's memory goes first, page cache or programs', where cgroups are of version 1."""

from __future__ import annotations

import time

from infiniswap.system.cgroup import FILES_FIRST, SWAPPINESS, MemoryCgroup
from infiniswap.units import MIB

_WAIT_S = 2.0
"""The device is asked about once a second what is far."""
_SWAPPED_BYTES = 64 * MIB
"""The kernel swaps a little in any case, of programs that have no far memory."""


class FilesFirst:
    """Page cache, while not much more of the job is in swap than far; else as with swap alone.

    Left to itself, the kernel swaps out what far memory would have taken. Version 2 has no
    swappiness: there the agents reclaim files (csrc/far/budget.c).

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
        """Several times a second.

        Args:
            far_bytes: of the job's memory that are far.
            swapped_bytes: of it that are in swap.
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
