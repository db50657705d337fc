# SPDX-License-Identifier: Apache-2.0
"""Loop devices with direct I/O: the block device over the fuse front end's file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import ConflictError, NotFoundError, SystemCallError, UnavailableError
from infiniswap.system import block
from infiniswap.system.files import SYS, try_read_int, try_read_text
from infiniswap.system.programs import run_command
from infiniswap.units import PAGE_BYTES

ATTACH_TRIES_MAX = 5
DETACH_S_MAX = 10.0

_SET_STATUS = 0x4C04
_GET_STATUS = 0x4C05
_INFO_BYTES = 232
_FILE = struct.Struct("=QQQ")
_FLAGS = struct.Struct("=I")
_FLAGS_AT = 52
_AUTOCLEAR = 4
"""ioctls LOOP_SET_STATUS64 and LOOP_GET_STATUS64 with their struct loop_info64, which begins with
st_dev, st_ino and st_rdev of the file (linux/loop.h)."""

QUEUE_SETTINGS = (
    # Half of what the front end takes at once (csrc/frontend/fuse.c): even a request whose memory
    # is not page aligned, so that it touches twice the pages, is then not cut in mid-page.
    ("max_sectors_kb", "128"),
    *block.AS_MEMORY,
    ("nr_requests", "128"),
)
"""What `tune` writes to /sys/block/loopN/queue, with why."""


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """An attached loop device.

    Attributes:
        number: N of /dev/loopN.
        backing: the file as the kernel names it now.
        deleted: that file has been removed since.
        direct_io: requests go past the page cache.
        autoclear: it detaches itself once nobody has it open.
        sequence: the kernel's count of attachments, of all block devices together: no two have the
            same. None before Linux 5.15.
    """

    number: int
    backing: str
    deleted: bool
    direct_io: bool
    autoclear: bool
    sequence: int | None = None

    @property
    def path(self) -> Path:
        """The device node."""
        return Path(f"/dev/loop{self.number}")

    def is_attachment(self, other: LoopDevice) -> bool:
        """Whether nobody has detached it between these two looks at one device. Not by the backing
        file, which may have been renamed or unmounted meanwhile, unless the kernel does not count.
        """
        if None in (self.sequence, other.sequence):
            return self.backing == other.backing
        return self.sequence == other.sequence


_DELETED = " (deleted)"


def loop_device(number: int, *, sys: Path = SYS) -> LoopDevice | None:
    """The attachment of loop device `number`, None when it has none."""
    directory = sys / "block" / f"loop{number}" / "loop"
    backing = try_read_text(directory / "backing_file")
    if backing is None:
        return None
    backing = backing.removesuffix("\n")
    return LoopDevice(
        number=number,
        backing=backing.removesuffix(_DELETED),
        deleted=backing.endswith(_DELETED),
        direct_io=(try_read_text(directory / "dio") or "").strip() == "1",
        autoclear=(try_read_text(directory / "autoclear") or "").strip() == "1",
        sequence=try_read_int(directory.parent / "diskseq"),
    )


def attached(*, sys: Path = SYS) -> tuple[LoopDevice, ...]:
    """Every attached loop device, by number."""
    devices = (loop_device(number, sys=sys) for number in block.numbers(sys / "block", "loop"))
    return tuple(device for device in devices if device is not None)


def find_by_backing(backing: Path, *, sys: Path = SYS) -> tuple[LoopDevice, ...]:
    """Loop devices on the file at `backing`. (Of a file system that was unmounted lazily the
    kernel only knows the path inside it, so such a device is not found by its old path.)"""
    wanted = os.path.realpath(backing)
    return tuple(device for device in attached(sys=sys) if device.backing == wanted)


def is_on(device: LoopDevice, status: os.stat_result) -> bool:
    """Whether a file that has the name of a loop device's file is that file. Another one is, where
    the device was attached in a container. True where the device's node cannot be opened."""
    with _status(device) as (_, info):
        if info is None:
            return True
        device_number, inode, block_device = _FILE.unpack_from(info)
        if stat.S_ISBLK(status.st_mode):  # it may have several nodes
            return bool(block_device == status.st_rdev)
        return (device_number, inode) == (status.st_dev, status.st_ino)


def attach(backing: Path, *, sector_bytes: int = PAGE_BYTES, sys: Path = SYS) -> LoopDevice:
    """Attaches a free loop device to the file, with direct I/O.

    Raises:
        UnavailableError: no loop devices, or the file cannot do direct I/O.
        SystemCallError, DeadlineError: losetup failed.
    """
    argv = ["losetup", "--find", "--show", "--direct-io=on", "--sector-size", str(sector_bytes)]
    for attempt in range(1, ATTACH_TRIES_MAX + 1):
        try:
            output = run_command([*argv, str(backing)]).strip()
            break
        except SystemCallError as error:
            # Somebody else may have taken the device that losetup had found free.
            taken = "busy" in error.what or "temporarily unavailable" in error.what
            if not taken or attempt == ATTACH_TRIES_MAX:
                raise _explain(error) from error
            time.sleep(0.05 * attempt)
    match = re.fullmatch(r"/dev/loop([0-9]+)", output, re.ASCII)
    device = None if match is None else loop_device(int(match[1]), sys=sys)
    if device is None:
        raise SystemCallError(f"losetup named {output!r}, which is not attached to anything")
    try:
        _make_writable(device, sys)
    except BaseException:
        detach(device, sys=sys)
        raise
    if not device.direct_io:
        detach(device, sys=sys)
        raise UnavailableError(
            "the loop device does not do direct I/O on this file; pages would be kept twice, and "
            "writing them out could need the memory that it is to free",
            where=str(backing),
        )
    return device


def _make_writable(device: LoopDevice, sys: Path) -> None:
    """Undoes a `blockdev --setro` of an earlier user: it outlives the attachment."""
    ro = sys / "block" / f"loop{device.number}" / "ro"
    if (try_read_text(ro) or "0").strip() == "1":
        run_command(["blockdev", "--setrw", str(device.path)])


def _explain(error: SystemCallError) -> UnavailableError | SystemCallError:
    if "cannot find an unused loop device" in error.what or "No such file" in error.what:
        return UnavailableError(
            error.what,
            mend="Load the loop driver (modprobe loop); in a container, pass /dev/loop-control "
            "and some /dev/loopN in.",
        )
    return error


def detach(device: LoopDevice, *, timeout_s: float = DETACH_S_MAX, sys: Path = SYS) -> None:
    """Detaches the device and verifies that: while somebody has it open, the kernel only promises
    to detach it later. Does nothing when it is attached to something else by now.

    Raises:
        ConflictError: it is still in use.
        SystemCallError, DeadlineError: losetup failed.
    """
    _detach(device, timeout_s, sys)
    if loop_device(device.number, sys=sys) is None:  # nobody has taken it since
        block.tune(device.path.name, block.GIVEN_BACK, sys=sys)


def _detach(device: LoopDevice, timeout_s: float, sys: Path) -> None:
    def still_there() -> bool:
        now = loop_device(device.number, sys=sys)
        return now is not None and now.is_attachment(device)

    if not still_there():
        return
    deadline = time.monotonic() + timeout_s
    try:
        run_command(["losetup", "--detach", str(device.path)], timeout_s=timeout_s)
    except SystemCallError:
        if still_there():
            raise
    while still_there():
        if time.monotonic() >= deadline:
            _keep(device)
            if not still_there():
                break  # its last user was faster
            raise ConflictError(
                "the loop device is still in use, so it stays attached",
                where=str(device.path),
                mend=f"See who has it: lsblk {device.path}; fuser -v {device.path}.",
            )
        time.sleep(0.02)


@contextlib.contextmanager
def _status(device: LoopDevice) -> Iterator[tuple[int, bytearray | None]]:
    """The device opened, and what it says of itself; None: it cannot be opened, or has no file."""
    try:
        descriptor = os.open(device.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield -1, None
        return
    try:
        yield descriptor, _info(descriptor)
    finally:
        os.close(descriptor)


def _info(descriptor: int) -> bytearray | None:
    info = bytearray(_INFO_BYTES)
    try:
        fcntl.ioctl(descriptor, _GET_STATUS, info)
    except OSError:
        return None
    return info


def _keep(device: LoopDevice) -> None:
    """Takes back the kernel's promise to detach the device when its last user closes it: what was
    refused is not to happen later, when nobody expects it."""
    with _status(device) as (descriptor, info):
        now = loop_device(device.number)  # stays as it is while it is open here
        if info is None or now is None or not now.is_attachment(device):
            return
        (flags,) = _FLAGS.unpack_from(info, _FLAGS_AT)
        _FLAGS.pack_into(info, _FLAGS_AT, flags & ~_AUTOCLEAR)
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, _SET_STATUS, info)


def tune(device: LoopDevice, *, is_disk: bool = False, sys: Path = SYS) -> tuple[str, ...]:
    """Best effort: writes QUEUE_SETTINGS, and for what lies on a disk the kernel's own throttling,
    for all others none. Returns the names of those the kernel refused."""
    throttling = block.GIVEN_BACK if is_disk else block.NOT_THROTTLED
    return block.tune(device.path.name, (*throttling, *QUEUE_SETTINGS), sys=sys)


def size_bytes(device: LoopDevice, *, sys: Path = SYS) -> int:
    """The device's size.

    Raises:
        NotFoundError: no such device.
    """
    text = try_read_text(sys / "block" / f"loop{device.number}" / "size")
    if text is None:
        raise NotFoundError("there is no such loop device", where=str(device.path))
    return int(text) * 512
