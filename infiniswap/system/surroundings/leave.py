# SPDX-License-Identifier: Apache-2.0
"""Takes off a service what a shell has left it with.

It leaves the cgroups of a session or of a batch job's step, for a scope of its own where systemd
runs and else for the root groups. Its soft limits become its hard ones, and it is neither nice nor
idle. It never leaves a unit's or a container's own cgroup, and it keeps the processors that it may
use. Nothing here is an error: `in_force` says what has stayed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

from infiniswap.errors import InfiniswapError
from infiniswap.system import systemd
from infiniswap.system.files import PROC, try_read_text, try_write_text
from infiniswap.system.surroundings.groups import foreign_groups, is_in_unit
from infiniswap.system.surroundings.limits import raise_limits

_IOPRIO_CALLS: Final = {"x86_64": (252, 251), "aarch64": (31, 30), "riscv64": (31, 30)}
"""Numbers of ioprio_get and ioprio_set, which no libc wraps, by machine."""
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_CLASS_SHIFT: Final = 13
_IOPRIO_IDLE: Final = 3
_IOPRIO_BEST_EFFORT: Final = 2
_IOPRIO_NORMAL: Final = 4


def settle(pid: int, name: str, *, managed: bool = False, proc: Path = PROC) -> None:
    """Makes a process, which has one thread and has allocated nothing yet, a service of the host.

    Args:
        pid: the process, the caller itself or a child.
        name: of its scope, without the ending.
        managed: a service manager has started it, so cgroup and priority are as they are meant.
        proc: root of the proc file system.
    """
    if not (managed or is_in_unit(pid, proc=proc)):
        before = _processors(pid)
        _leave_groups(pid, name, proc)
        if _processors(pid) != before:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(pid, before)
        _be_ordinary(pid)
    raise_limits(pid)


def _processors(pid: int) -> frozenset[int]:
    with contextlib.suppress(ProcessLookupError):
        return frozenset(os.sched_getaffinity(pid))
    return frozenset()


def _leave_groups(pid: int, name: str, proc: Path) -> None:
    foreign = foreign_groups(pid, proc=proc)
    if foreign and os.geteuid() == 0 and systemd.has_bus():
        with contextlib.suppress(InfiniswapError):
            _into_scope(pid, f"{name}.scope", proc)
        # systemd leaves alone what it does not manage, such as the freezer of version 1.
        foreign = foreign_groups(pid, proc=proc)
    for _, home in foreign:
        try_write_text(home / "cgroup.procs", str(pid))


def _into_scope(pid: int, unit: str, proc: Path) -> None:
    systemd.start_unit(
        unit,
        f"PIDs au 1 {pid}",
        "Slice s system.slice",
        # systemd ends no delegated unit when the kernel has killed one of its processes for lack of
        # memory: its standby takes over.
        "Delegate b true",
        # The swap area goes first, however long that takes; the network goes after it.
        "SendSIGKILL b false",
        "After as 1 network.target",
        "CollectMode s inactive-or-failed",
    )
    systemd.wait_until(
        lambda: unit in (try_read_text(proc / str(pid) / "cgroup") or unit),
        f"process {pid} in {unit}",
    )


def _be_ordinary(pid: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, pid) > 0:
            os.setpriority(os.PRIO_PROCESS, pid, 0)
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(pid) in (os.SCHED_IDLE, os.SCHED_BATCH):
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    calls = _IOPRIO_CALLS.get(os.uname().machine)
    if calls is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    value = libc.syscall(calls[0], _IOPRIO_WHO_PROCESS, pid)
    kind, level = value >> _IOPRIO_CLASS_SHIFT, value & (1 << _IOPRIO_CLASS_SHIFT) - 1
    if value >= 0 and (
        kind == _IOPRIO_IDLE or (kind == _IOPRIO_BEST_EFFORT and level > _IOPRIO_NORMAL)
    ):
        libc.syscall(calls[1], _IOPRIO_WHO_PROCESS, pid, 0)
