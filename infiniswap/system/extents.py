# SPDX-License-Identifier: Apache-2.0
"""How much of a file has room on its file system: FS_IOC_FIEMAP, see <linux/fiemap.h>.

A file's count of blocks includes those beyond its end, and SEEK_HOLE takes blocks that were
reserved and not written for a hole.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FIEMAP: Final = 0xC020660B
_HEAD: Final = struct.Struct("=QQIIII")  # start, length, flags, found, room for, reserved
_EXTENT: Final = struct.Struct("=QQQ16xI12x")  # logical, physical, length, flags
_EXTENTS_MAX: Final = 512
"""How many one question asks for."""


def allocated_bytes(path: Path, status: os.stat_result, end: int) -> int:
    """How many of a file's first `end` bytes have blocks, written or not. Where the file system
    does not tell, or the file cannot be opened: the bytes of all its blocks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return status.st_blocks * 512
    try:
        return sum(_lengths(descriptor, end))
    except OSError:
        return status.st_blocks * 512
    finally:
        os.close(descriptor)


def _lengths(descriptor: int, end: int) -> Iterator[int]:
    """The parts of extents before `end`."""
    at = 0
    while at < end:
        asked = bytearray(_HEAD.size + _EXTENTS_MAX * _EXTENT.size)
        _HEAD.pack_into(asked, 0, at, end - at, 0, 0, _EXTENTS_MAX, 0)
        fcntl.ioctl(descriptor, _FIEMAP, asked)
        found = _HEAD.unpack_from(asked)[3]
        if found == 0:
            return
        for number in range(found):
            start, _, length, _ = _EXTENT.unpack_from(asked, _HEAD.size + number * _EXTENT.size)
            yield max(0, min(start + length, end) - max(start, at))
            at = max(at, start + length)
