# SPDX-License-Identifier: Apache-2.0
"""Events of the kernel, one ring of records for each processor: perf_event_open(2)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import InfiniswapError, UnavailableError, from_oserror
from infiniswap.system.files import read_text
from infiniswap.units import PAGE_BYTES

TRACEPOINT: Final = 2
SOFTWARE: Final = 1
"""Types of events."""

TELLS_THREAD: Final = 1 << 1
TELLS_TIME: Final = 1 << 2
TELLS_ADDRESS: Final = 1 << 3
TELLS_RAW: Final = 1 << 10
"""What a sample tells, in this order."""

LOST: Final = 2
SAMPLE: Final = 9
"""Kinds of records."""

HEADER: Final = struct.Struct("<IHH")
"""Of each record: its kind, flags, bytes."""

_ONLINE: Final = Path("/sys/devices/system/cpu/online")
_SYSCALLS: Final = {"x86_64": 298, "aarch64": 241, "riscv64": 241}
_ATTR_BYTES, _FLAGS_AT, _CLOCK_ID_AT = 112, 40, 92
_DISABLED: Final = 1 << 0
_OWN_CLOCK: Final = 1 << 25
_CLOCK_MONOTONIC: Final = 1
_CLOSE_ON_EXEC: Final = 8
_ENABLE: Final = 0x2400
_DISABLE: Final = 0x2401
_SET_FILTER: Final = 0x40082406
_HEAD_AT, _TAIL_AT = 1024, 1032
_PLACE: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class PerfEvent:
    """What is queued.

    Attributes:
        name: for errors: "cannot ...".
        type: of the event.
        number: of that type.
        tells: the bits of what a sample tells; a time is one of CLOCK_MONOTONIC.
        wakes: records after which a reader that waits is woken; 0: when the ring is half full.
        filter: for the kernel; of a tracepoint only.
    """

    name: str
    type: int
    number: int
    tells: int
    wakes: int = 0
    filter: str = ""

    def attributes(self) -> bytes:
        """struct perf_event_attr."""
        found = bytearray(_ATTR_BYTES)
        struct.pack_into("<IIQQQ", found, 0, self.type, _ATTR_BYTES, self.number, 1, self.tells)
        flags = _DISABLED | (_OWN_CLOCK if self.tells & TELLS_TIME else 0)
        struct.pack_into("<QI", found, _FLAGS_AT, flags, self.wakes)
        if flags & _OWN_CLOCK:
            struct.pack_into("<i", found, _CLOCK_ID_AT, _CLOCK_MONOTONIC)
        return bytes(found)


class PerfRing:
    """What one processor queues while it is started. The kernel ends it with the process that made
    it, however that ends.

    Args:
        event: of every process.
        processor: its number.
        ring_bytes: a power of two, pages.

    Raises:
        UnavailableError: this processor is unknown.
        NotPermittedError, SystemCallError: the kernel's refusal.
    """

    def __init__(self, event: PerfEvent, processor: int, ring_bytes: int) -> None:
        check_machine(event.name)
        self._library = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(event.attributes(), _ATTR_BYTES)
        number = _SYSCALLS[platform.machine()]
        self._fd = self._library.syscall(number, buffer, -1, processor, -1, _CLOSE_ON_EXEC)
        if self._fd < 0:
            raise _refusal(event)
        self._bytes = ring_bytes
        try:
            self._map = mmap.mmap(self._fd, PAGE_BYTES + self._bytes)
            text = ctypes.create_string_buffer(event.filter.encode())
            if event.filter and self._library.ioctl(self._fd, _SET_FILTER, text):
                raise _refusal(event)
        except OSError as error:
            os.close(self._fd)
            raise from_oserror(event.name, error) from None
        except InfiniswapError:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """Readable once enough has come, see PerfEvent.wakes."""
        return int(self._fd)

    def start(self) -> None:
        """Events come from now on."""
        self._library.ioctl(self._fd, _ENABLE, 0)

    def stop(self) -> None:
        """No others come."""
        self._library.ioctl(self._fd, _DISABLE, 0)

    def take(self) -> Iterator[bytes]:
        """The records since the last time."""
        head: int = _PLACE.unpack_from(self._map, _HEAD_AT)[0]
        tail: int = _PLACE.unpack_from(self._map, _TAIL_AT)[0]
        begin, end = tail % self._bytes, head % self._bytes
        ring = PAGE_BYTES
        if head == tail:
            return
        if begin < end:
            data = self._map[ring + begin : ring + end]
        else:
            data = self._map[ring + begin : ring + self._bytes] + self._map[ring : ring + end]
        _PLACE.pack_into(self._map, _TAIL_AT, head)
        at = 0
        while at < len(data):
            size = HEADER.unpack_from(data, at)[2]
            yield data[at : at + size]
            at += size

    def close(self) -> None:
        """Ends it."""
        self._map.close()
        os.close(self._fd)


def check_machine(what: str, page_bytes: int = mmap.PAGESIZE) -> None:
    """Raises UnavailableError where we do not know the system call, or the kernel's pages, by
    which rings are laid out, are larger."""
    if platform.machine() not in _SYSCALLS or page_bytes != PAGE_BYTES:
        raise UnavailableError(f"{what} on {platform.machine()}, pages of {page_bytes} bytes")


def open_rings(make: Callable[[int], PerfRing]) -> list[PerfRing]:
    """One for each processor that is online, or none.

    Raises:
        InfiniswapError: of `make`; or nobody says which are online.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for processor in online():
            found.append(make(processor))
            stack.callback(found[-1].close)
        stack.pop_all()
    return found


def online() -> list[int]:
    """The processors that are.

    Raises:
        NotPermittedError, SystemCallError: nobody says.
    """
    text = read_text(_ONLINE, "cannot tell the processors of this host")
    ranges = [part.split("-") for part in text.strip().split(",")]
    return [number for each in ranges for number in range(int(each[0]), int(each[-1]) + 1)]


def _refusal(event: PerfEvent) -> InfiniswapError:
    code = ctypes.get_errno()
    return from_oserror(event.name, OSError(code, os.strerror(code)))
