# SPDX-License-Identifier: Apache-2.0
"""Memory of another process: which of its pages are where, advice about them, and a touch.

It takes the rights to trace the process, and CAP_SYS_NICE for advice. A call waits for locks on
that memory, and for a page if the process whose lock it is does.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from infiniswap.errors import InfiniswapError
from infiniswap.system.files import PROC
from infiniswap.system.process import pidfd_open
from infiniswap.units import PAGE_BYTES

WILL_NEED: Final = 3
COLD: Final = 20
"""Advice of madvise(2)."""

_PROCESS_MADVISE: Final = 440
_PRESENT: Final = 1 << 63
_SWAPPED: Final = 1 << 62
_ENTRY_BYTES: Final = 8
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_size_t))  # struct iovec


def advise(pid: int, start: int, size_bytes: int, advice: int) -> bool:
    """Gives advice about a range of a process's memory; False when it has none there, or has ended.

    Raises:
        PermissionError: see above.
    """
    part = _Range(start, size_bytes)
    try:
        pidfd = pidfd_open(pid)
    except InfiniswapError:
        return False
    try:
        done = _LIBC.syscall(
            _PROCESS_MADVISE, pidfd, ctypes.byref(part), ctypes.c_size_t(1), advice, 0
        )
        if done < 0:
            _check_rights("process_madvise")
        return bool(done > 0)
    finally:
        os.close(pidfd)


def touch(pid: int, addresses: Sequence[int]) -> int:
    """Maps the pages at these addresses for a process, as its own reads of them would, and waits
    for them: process_vm_readv(2), a byte of each. Ends at the first address where nothing is.

    Args:
        pid: of the process.
        addresses: at most IOV_MAX.

    Returns:
        pages that were touched.

    Raises:
        PermissionError: see above.
    """
    count, one, flags = (ctypes.c_ulong(number) for number in (len(addresses), 1, 0))
    found = ctypes.create_string_buffer(len(addresses))
    here = _Range(ctypes.addressof(found), len(addresses))
    parts = array("Q", bytes(2 * _ENTRY_BYTES * len(addresses)))  # struct iovec, of a byte each
    parts[::2] = array("Q", addresses)
    parts[1::2] = array("Q", (1,)) * len(addresses)
    there = (_Range * len(addresses)).from_buffer(parts)
    done = int(_LIBC.process_vm_readv(pid, ctypes.byref(here), one, there, count, flags))
    if done < 0:
        _check_rights("process_vm_readv")
    return max(0, done)


def _check_rights(call: str) -> None:
    if ctypes.get_errno() in (errno.EPERM, errno.EACCES):
        raise PermissionError(errno.EPERM, call)


class PageMap:
    """Where the pages of a range of a process's memory are, at the moment when it is made.

    Args:
        pid: of the process; of one that has ended, no page is anywhere.
        start: a page's address.
        pages: how many.
        proc: root of the proc file system.

    Raises:
        PermissionError: see above.
    """

    def __init__(self, pid: int, start: int, pages: int, *, proc: Path = PROC) -> None:
        at, size_bytes = start // PAGE_BYTES * _ENTRY_BYTES, pages * _ENTRY_BYTES
        found = b""
        try:
            with (proc / str(pid) / "pagemap").open("rb", buffering=0) as file:
                found = os.pread(file.fileno(), size_bytes, at)
        except PermissionError:
            raise
        except OSError:
            pass  # it has ended, or no address can be there
        self._entries = array("Q", found[: len(found) // _ENTRY_BYTES * _ENTRY_BYTES])

    def swapped(self) -> list[int]:
        """Those on a swap device, counted from the start."""
        return [n for n, entry in enumerate(self._entries) if entry & _SWAPPED]

    def is_present(self, page: int) -> bool:
        """Whether the process can use it without a fault."""
        return page < len(self._entries) and bool(self._entries[page] & _PRESENT)
