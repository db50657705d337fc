# SPDX-License-Identifier: Apache-2.0
"""A limit on locked memory that holds for root, too: it is none to a thread with CAP_IPC_LOCK."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_CAP_IPC_LOCK = 14
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def locked_memory_limit(bytes_more: int) -> Iterator[None]:
    """For this thread: what this process may register with devices beyond what it has already."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _set_effective(False)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (_pinned_bytes() + bytes_more, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
        _set_effective(True)


def _pinned_bytes() -> int:
    found = re.search(r"^VmPin:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _set_effective(wanted: bool) -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # twice effective, permitted, inheritable
    _check(_LIBC.capget(header, data))
    bit = 1 << _CAP_IPC_LOCK
    data[0] = data[0] | bit if wanted else data[0] & ~bit
    _check(_LIBC.capset(header, data))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
