# SPDX-License-Identifier: Apache-2.0
"""A running process: how much memory it uses, and how its pace falls with less."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import (
    ConflictError,
    InfiniswapError,
    NotFoundError,
    UnavailableError,
)
from infiniswap.system import swap, touched
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC, read_text, try_read_text, write_text
from infiniswap.system.memory import memory_hierarchy
from infiniswap.units import PAGE_BYTES

LOOKS_S: Final = (1.0, 2.0, 4.0, 8.0)
"""After clearing the bits."""
_SHARES: Final = (90, 80, 70, 60, 50)
_STEP_S: Final = 4.0
_SLOWDOWN_MAX: Final = 2.0
_BUSY_MIN: Final = 0.1
"""With less processor time a second there is no pace to compare."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a process uses.

    Attributes:
        seconds: since the bits were cleared.
        referenced_bytes: used since then.
        resident_bytes: all that it has in RAM.
        swapped_bytes: swapped out.
    """

    seconds: float
    referenced_bytes: int
    resident_bytes: int
    swapped_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A limit that was tried.

    Attributes:
        slowdown: the pace without the limit, by the pace with it.
        page_ins_per_s: reads from swap.
    """

    limit_bytes: int
    slowdown: float
    page_ins_per_s: float


def require(pid: int, *, proc: Path = PROC) -> None:
    """Raises NotFoundError where there is no such process, or a thread of the kernel."""
    if not try_read_text(proc / str(pid) / "smaps_rollup"):
        raise NotFoundError(
            f"there is no process {pid} with memory of its own that you may look at",
            where="--pid",
            mend="`ps aux` lists processes; those of other users need root.",
        )


def working_set(pid: int, looks_s: Sequence[float] = LOOKS_S) -> Iterator[Used]:
    """Clears the bits, and looks several times.

    Raises:
        NotPermittedError, NotFoundError, SystemCallError: it cannot be looked at, or has ended.
    """
    touched.clear([pid])
    began_s = time.monotonic()
    for at_s in looks_s:
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        require(pid)
        now = touched.touched([pid])
        yield Used(at_s, now.referenced_bytes, now.resident_bytes, now.swapped_bytes)


def cgroup_of(pid: int) -> MemoryCgroup:
    """The cgroup whose limit may be lowered for this process.

    Raises:
        ConflictError: others are in it, or it is the root.
        UnavailableError: there is not enough free swap.
    """
    hierarchy = memory_hierarchy(pid=pid)
    cgroup = MemoryCgroup(hierarchy.own, hierarchy.version)
    others = [other for other in cgroup.pids() if other != pid]
    if hierarchy.own == hierarchy.mount_point or others:
        raise ConflictError(
            f"process {pid} shares its memory cgroup with others, whose limit this would be, too",
            where=str(hierarchy.own),
            mend="Start it with `infiniswap run`, or in a cgroup of its own.",
        )
    free_bytes = sum(area.size_bytes - area.used_bytes for area in swap.active_areas())
    if free_bytes < cgroup.memory().anon_bytes:
        raise UnavailableError(
            "there is not enough free swap space for the process's memory",
            mend="Start a device: infiniswap device start NAME --size SIZE --swap.",
        )
    return cgroup


def probe(pid: int, cgroup: MemoryCgroup) -> Iterator[Step]:
    """Lowers the limit step by step, until the process is at half of its pace, and takes it back.

    Raises:
        UnavailableError: the process does too little to have a pace.
        InfiniswapError: the limit cannot be set.
    """
    name = "memory.max" if cgroup.version == 2 else "memory.limit_in_bytes"
    file = cgroup.path / name
    before = read_text(file, "cannot read the memory limit").strip()
    full_bytes = cgroup.memory().anon_bytes
    try:
        whole = _pace(pid)
        if whole.user_per_s < _BUSY_MIN:
            raise UnavailableError(
                f"process {pid} uses {whole.user_per_s:.0%} of a processor: too little for a pace",
                mend="Probe it while it works; the working set above stands.",
            )
        for share in _SHARES:
            limit_bytes = full_bytes * share // 100 // PAGE_BYTES * PAGE_BYTES
            cgroup.set_limit(limit_bytes)
            pace = _pace(pid)
            slowdown = whole.user_per_s / max(pace.user_per_s, 1e-3)
            yield Step(limit_bytes, slowdown, pace.page_ins_per_s)
            if slowdown > _SLOWDOWN_MAX:
                return
    finally:
        # Version 1 writes no limit as a number above all that it takes.
        text = "-1" if cgroup.version == 1 and int(before) > 1 << 60 else before
        with contextlib.suppress(NotFoundError, InfiniswapError):
            write_text(file, text, "cannot set the memory limit")


@dataclass(frozen=True, slots=True)
class _Pace:
    user_per_s: float
    page_ins_per_s: float


def _pace(pid: int) -> _Pace:
    user = touched.UserTime()
    began_s, user_s, pages = time.monotonic(), user.add([pid]), _page_ins()
    time.sleep(_STEP_S)
    require(pid)
    passed_s = time.monotonic() - began_s
    return _Pace((user.add([pid]) - user_s) / passed_s, (_page_ins() - pages) / passed_s)


def _page_ins() -> int:
    """Of the whole host: cgroups of version 1 do not count their own."""
    for line in read_text(PROC / "vmstat", "cannot read the memory counters").splitlines():
        name, _, value = line.partition(" ")
        if name == "pswpin":
            return int(value)
    return 0


def smallest(steps: list[Step], slowdown: float) -> Step | None:
    """The least limit tried with at most that slowdown; None: not one."""
    fitting = [step for step in steps if step.slowdown <= slowdown]
    return min(fitting, key=lambda step: step.limit_bytes, default=None)
