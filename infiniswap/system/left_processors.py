# SPDX-License-Identifier: Apache-2.0
"""Processors that a process has left, and that page-out still interrupts for it.

Before the kernel writes a page out, each processor that may have the page's address in its TLB has
to forget it, which takes an interrupt per page and processor. Since Linux 6.13 on x86 a processor
counts as one of these for as long as the process lives: the kernel strikes it off only when it
flushes a range of the process's memory, at most once a second, and page-out makes no such flush
(arch/x86/mm/tlb.c: should_trim_cpumask(), arch_tlbbatch_flush()). A process that was moved from
processor to processor, as happens beside the threads that serve its pages, then waits for
interrupts most of the time.

A range is flushed when a page that was used since is marked cold: process_madvise(2) with
MADV_COLD, here for one page that a running thread always uses, the one that holds its thread
control block. The C library tells the kernel that address (get_robust_list(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from infiniswap.system.files import PROC
from infiniswap.system.process import cpu_ticks
from infiniswap.system.process_memory import COLD, advise
from infiniswap.units import PAGE_BYTES

_FIRST_KERNEL: Final = (6, 13)
_GET_ROBUST_LIST: Final = 274  # on x86-64, as all of this
_THREADS_MAX: Final = 256
"""Looked at in each process: of so many that run, one is as good as another."""

Mark = Callable[[int, int], bool]
"""Marks the page that holds a thread's control block, of a process and thread, as cold; False when
there is none. Raises PermissionError where that is not allowed."""


def is_needed(machine: str, release: str) -> bool:
    """Whether a kernel keeps processors that were left, by what uname(2) says of it."""
    numbers = re.match(r"(\d+)\.(\d+)", release, re.ASCII)
    if machine != "x86_64" or numbers is None:
        return False
    return (int(numbers[1]), int(numbers[2])) >= _FIRST_KERNEL


def is_needed_here() -> bool:
    """Whether this host's kernel keeps them."""
    return is_needed(platform.machine(), platform.release())


def mark_control_block(pid: int, tid: int) -> bool:
    """See Mark.

    Raises:
        PermissionError: it takes the rights to trace the process, and CAP_SYS_NICE.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    refused = libc.syscall(_GET_ROBUST_LIST, tid, ctypes.byref(head), ctypes.byref(size))
    if refused and ctypes.get_errno() == errno.EPERM:
        raise PermissionError(errno.EPERM, "get_robust_list")
    if refused or not head.value:
        return False
    return advise(pid, head.value & ~(PAGE_BYTES - 1), PAGE_BYTES, COLD)


class LeftProcessors:
    """Has the kernel strike off what processes have left; one look after another.

    Args:
        proc: root of the proc file system.
        mark: the system calls, or a test's.
    """

    def __init__(self, *, proc: Path = PROC, mark: Mark = mark_control_block) -> None:
        self._proc = proc
        self._mark = mark
        self._ticks: dict[Path, int] = {}

    def strike_off(self, pids: Iterable[int]) -> int:
        """For each process that ran since the last call, by its busiest thread. Returns for how
        many.

        Raises:
            PermissionError: it is not allowed for any of them, see mark_control_block.
        """
        seen: dict[Path, int] = {}
        struck, refusal = 0, None
        for pid in pids:
            process = self._proc / str(pid)
            if not self._ran_since(process / "stat", seen):
                continue
            busiest = self._busiest(process / "task", seen)
            try:
                if busiest is not None and self._mark(pid, busiest):
                    struck += 1
            except PermissionError as error:
                refusal = error
        self._ticks = seen
        if refusal is not None and not struck:
            raise refusal
        return struck

    def _ran_since(self, stat: Path, seen: dict[Path, int]) -> int:
        """Clock ticks since the last call, 0 for what has ended. The sum is added to `seen`."""
        ticks = cpu_ticks(stat)
        if ticks is None:
            return 0
        seen[stat] = ticks
        return ticks - self._ticks.get(stat, 0)

    def _busiest(self, task: Path, seen: dict[Path, int]) -> int | None:
        """The thread that has run for longest since the last call, None when none has run."""
        longest, found = 0, None
        with contextlib.suppress(OSError):  # the process has ended
            for name in os.listdir(task)[:_THREADS_MAX]:
                since = self._ran_since(task / name / "stat", seen)
                if since > longest:
                    longest, found = since, int(name)
        return found
