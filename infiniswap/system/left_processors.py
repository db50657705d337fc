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

from infiniswap.errors import NotFoundError, SystemCallError
from infiniswap.system.files import PROC
from infiniswap.system.process import cpu_ticks, pidfd_open
from infiniswap.units import PAGE_BYTES

_FIRST_KERNEL: Final = (6, 13)
_GET_ROBUST_LIST: Final = 274  # on x86-64, as all of this
_PROCESS_MADVISE: Final = 440
_MADV_COLD: Final = 20

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


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_size_t))  # struct iovec


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
    page = _Range(head.value & ~(PAGE_BYTES - 1), PAGE_BYTES)
    try:
        pidfd = pidfd_open(pid)
    except (NotFoundError, SystemCallError):
        return False
    try:
        done = libc.syscall(
            _PROCESS_MADVISE, pidfd, ctypes.byref(page), ctypes.c_size_t(1), _MADV_COLD, 0
        )
        if done < 0 and ctypes.get_errno() == errno.EPERM:
            raise PermissionError(errno.EPERM, "process_madvise")
        return bool(done > 0)
    finally:
        os.close(pidfd)


class LeftProcessors:
    """Has the kernel strike off what processes have left; one look after another.

    Args:
        proc: root of the proc file system.
        mark: the system calls, or a test's.
    """

    def __init__(self, *, proc: Path = PROC, mark: Mark = mark_control_block) -> None:
        self._proc = proc
        self._mark = mark
        self._ticks: dict[int, int] = {}

    def strike_off(self, pids: Iterable[int]) -> int:
        """For each process that ran since the last call, by its busiest thread. Returns for how
        many.

        Raises:
            PermissionError: see mark_control_block.
        """
        seen: dict[int, int] = {}
        struck = 0
        for pid in pids:
            busiest = self._busiest(pid, seen)
            if busiest is not None and self._mark(pid, busiest):
                struck += 1
        self._ticks = seen
        return struck

    def _busiest(self, pid: int, seen: dict[int, int]) -> int | None:
        """The thread that has run for longest since the last call, None when none has run. What
        each has run in all is added to `seen`."""
        longest, found = 0, None
        with contextlib.suppress(OSError):  # the process has ended
            for name in os.listdir(self._proc / str(pid) / "task"):
                tid = int(name)
                ticks = cpu_ticks(pid, tid, proc=self._proc)
                if ticks is None:
                    continue
                seen[tid] = ticks
                since = ticks - self._ticks.get(tid, 0)
                if since > longest:
                    longest, found = since, tid
        return found
