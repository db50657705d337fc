# SPDX-License-Identifier: Apache-2.0
"""Says whether this host can do far memory, and why not: kernel, C library, userfaultfd.

Far memory moves pages between two places of one process (UFFDIO_MOVE, Linux 6.8). That call has had
faults beside swap and huge pages, so a kernel counts only if its release has the fixes in _FIXES.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infiniswap.units import PAGE_BYTES

DEVICE: Final = Path("/dev/userfaultfd")

_MOVE_SINCE: Final = (6, 8)

_NEW: Final = 0xAA00  # USERFAULTFD_IOC_NEW
_API: Final = 0xC018AA3F  # UFFDIO_API
_API_VERSION: Final = 0xAA
_API_STRUCT: Final = struct.Struct("=QQQ")  # api, features, ioctls

_FEATURES: Final = {
    "EVENT_REMAP": 1 << 2,
    "EVENT_REMOVE": 1 << 3,
    "EVENT_UNMAP": 1 << 6,
    "POISON": 1 << 14,
    "MOVE": 1 << 16,
}
"""What the agent asks of its userfaultfd (csrc/far/memory.c)."""

Series = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Fix:
    """The mend of one fault of UFFDIO_MOVE.

    Attributes:
        name: of the fault.
        since: first series that has the fault.
        fixed: first release with the mend, by series: (6, 12): 20 is Linux 6.12.20.
        gone: first series that never had the fault again.
    """

    name: str
    since: Series
    fixed: Mapping[Series, int] = field(default_factory=dict)
    gone: Series = (7, 0)

    def is_in(self, series: Series, point: int) -> bool:
        """Whether a release has the mend, or never had the fault. `point`: -1 before the series'
        first release."""
        if series < self.since or series > self.gone:
            return True
        first = 0 if series == self.gone else self.fixed.get(series)
        return first is not None and point >= first


_FIXES: Final = (
    # A page in the swap cache is moved without its folio: the kernel stops with a BUG. By the CVE
    # record.
    _Fix("CVE-2025-21984", (6, 8), {(6, 12): 20, (6, 13): 8}, (6, 14)),
    # A race with the swap cache moves another process's page. By the CVE record.
    _Fix("CVE-2025-38242", (6, 8), {(6, 12): 37, (6, 15): 5}, (6, 16)),
    # A huge page that is being migrated (compaction) crashes the kernel. By the announcements of
    # the stable releases of August 2025.
    _Fix("commit aba6faec0103", (6, 8), {(6, 12): 43, (6, 15): 11, (6, 16): 2}, (6, 17)),
    # The huge zero page, which a read of fresh memory maps, is moved as an address of no memory. By
    # the CVE record.
    _Fix("CVE-2026-31397", (6, 16), {(6, 18): 20, (6, 19): 10}, (7, 0)),
)
# Not in the table: CVE-2026-99652, a deadlock with mremap() of memory that shares page tables with
# what is moved, and commit 4165b7d1c45c, a wrong lock while a huge page is being migrated. Few
# kernels have their mends yet, and no record says which stable releases do.

_KERNELS: Final = "Use Linux 6.12.43, 6.18.20, 6.19.10 or 7.0, or a later release of these series."


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why this host cannot do far memory; `mend` is a whole sentence."""

    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}. {self.mend}"


def _features(device_fd: int) -> int:
    """The bits that the kernel offers on an open /dev/userfaultfd. OSError: none, or it may not."""
    fd = fcntl.ioctl(device_fd, _NEW, os.O_CLOEXEC)
    try:
        asked = _API_STRUCT.pack(_API_VERSION, 0, 0)
        return int(_API_STRUCT.unpack(fcntl.ioctl(fd, _API, asked))[1])
    finally:
        os.close(fd)


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""  # musl knows no such name


def far_refusal() -> str | None:
    """Why this host cannot do far memory, with the remedy; None: it can."""
    found = far_obstacle()
    return None if found is None else str(found)


def far_obstacle(
    *,
    release: str | None = None,
    libc: Callable[[], str] = _libc,
    device: Path = DEVICE,
    features: Callable[[int], int] = _features,
) -> Obstacle | None:
    """The first thing that keeps this host from far memory; None: nothing does. Does not wait.

    Args:
        release: of the kernel, as uname tells it; None: this one's.
        libc: returns the C library's name and version; empty: it is not glibc.
        device: the node that makes a userfaultfd.
        features: returns the bits that the kernel offers on that open device.
    """
    return (
        _program_obstacle(libc())
        or kernel_obstacle(os.uname().release if release is None else release)
        or _device_obstacle(device, features)
    )


def _program_obstacle(libc: str) -> Obstacle | None:
    if sys.maxsize < 1 << 32 or mmap.PAGESIZE != PAGE_BYTES:
        bits = 64 if sys.maxsize > 1 << 32 else 32
        return Obstacle(
            f"far memory needs 64 bits and pages of {PAGE_BYTES} bytes; this host has {bits} bits "
            f"and pages of {mmap.PAGESIZE} bytes",
            "Use `--paging swap`.",
        )
    if not libc:
        return Obstacle(
            "far memory needs the GNU C library (glibc), and this host has another one",
            "Use a distribution with glibc, or `--paging swap`.",
        )
    return None


def kernel_obstacle(release: str) -> Obstacle | None:
    """What keeps a kernel from moving pages safely, by its release's number alone.

    Args:
        release: as uname tells it, such as 6.12.43+deb12-amd64.
    """
    number = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if number is None:
        return Obstacle(f"the kernel's release {release!r} has no number to judge it by", _KERNELS)
    series, point = (int(number[1]), int(number[2])), int(number[3] or 0)
    if "-rc" in release:
        point = -1
    if series < _MOVE_SINCE:
        return Obstacle(
            f"Linux {series[0]}.{series[1]} cannot move pages within a process: UFFDIO_MOVE came "
            f"with Linux {_MOVE_SINCE[0]}.{_MOVE_SINCE[1]}",
            _KERNELS,
        )
    lacks = [fix.name for fix in _FIXES if not fix.is_in(series, point)]
    if not lacks:
        return None
    return Obstacle(
        f"Linux {release} can crash or mix up pages that are moved within a process: by its number "
        f"it lacks the fix of {' and of '.join(lacks)}",
        _KERNELS,
    )


def _device_obstacle(device: Path, features: Callable[[int], int]) -> Obstacle | None:
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return Obstacle(
            f"there is no {device}",
            "In a container, give it that device (docker: --device /dev/userfaultfd); elsewhere "
            "use a kernel with CONFIG_USERFAULTFD.",
        )
    except OSError as error:
        mend = "Run it with sudo." if os.geteuid() else "In a container, give it that device."
        return Obstacle(f"{device} cannot be opened ({error.strerror})", mend)
    try:
        offered = features(fd)
    except OSError as error:
        return Obstacle(
            f"{device} makes no userfaultfd ({error.strerror})",
            "In a container or sandbox, allow userfaultfd.",
        )
    finally:
        os.close(fd)
    lacks = [name for name, bit in _FEATURES.items() if not offered & bit]
    if lacks:
        return Obstacle(f"the kernel's userfaultfd lacks {', '.join(lacks)}", _KERNELS)
    return None
