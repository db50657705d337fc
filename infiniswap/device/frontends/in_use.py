# SPDX-License-Identifier: Apache-2.0
"""Who uses a block device (swap areas, mounts, processes), so that none in use is removed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from infiniswap.control.text import clean_text
from infiniswap.errors import ConflictError
from infiniswap.system import mounts, swap
from infiniswap.system.files import try_read_text

_BRIEF_USE_S = 2.0
_PROCESSES_NAMED_MAX = 5


def _mount_points(device: int) -> list[str]:
    number = f"{os.major(device)}:{os.minor(device)}"
    return [str(mount.mount_point) for mount in mounts.mounts_of_device(number)]


def check_unused(path: Path, *, where: str) -> None:
    """Looks who uses a device that serves. The kernel would not refuse to detach it: it detaches a
    loop device later, when the last user is gone.

    Raises:
        ConflictError: who uses it.
    """
    device = path.stat().st_rdev
    if users := _mount_points(device):
        raise ConflictError(
            f"it is mounted at {', '.join(users)}",
            where=where,
            mend=f"Unmount it: umount {users[0]}.",
        )
    if swap.find_area(path) is not None:
        raise ConflictError("it is in use as swap space", where=where)
    end_s = time.monotonic() + _BRIEF_USE_S
    while opened := processes_with_open(device):
        if time.monotonic() >= end_s:
            raise ConflictError(
                f"it is open in {', '.join(opened)}", where=where, mend="End that first."
            )
        time.sleep(0.05)  # something that only had a look, as udev does
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        raise ConflictError(
            f"the kernel uses it ({error.strerror}): mounted in a container, or part of LVM, "
            "RAID or encryption",
            where=where,
            mend=f"See what it is with lsblk {path}.",
        ) from error


def check_left_unused(path: Path, name: str, mend: str) -> None:
    """Looks who uses a block device that a killed process of a device has left.

    Args:
        path: the block device; nothing is wrong when it is gone.
        name: of the infiniswap device.
        mend: what to do about swap space there.

    Raises:
        ConflictError: it is swap space whose contents are gone, or mounted.
    """
    where = f"device {name}"
    if swap.find_area(path) is not None:
        raise ConflictError(
            f"{path} is swap space of an earlier process of this device that died",
            where=where,
            mend=mend,
        )
    try:
        users = _mount_points(path.stat().st_rdev)
    except OSError:
        return
    if users:
        raise ConflictError(
            f"{path}, of an earlier process of this device that died, is mounted at {users[0]}",
            where=where,
            mend=f"Unmount it: umount -l {users[0]}.",
        )


@contextlib.contextmanager
def held(path: Path, name: str) -> Iterator[None]:
    """Keeps others from using the block device meanwhile; does nothing if it no longer exists.

    Raises:
        ConflictError: it is in use.
    """
    try:
        holder = os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except FileNotFoundError:
        yield  # an administrator was faster
        return
    except OSError as error:
        raise ConflictError(
            f"{path} is in use ({error.strerror})",
            where=f"device {name}",
            mend=f"See by whom: lsblk {path}; fuser -v {path}.",
        ) from error
    try:
        yield
    finally:
        os.close(holder)


def processes_with_open(device: int) -> list[str]:
    """Processes, this one left out, that have a block device open: `name (pid)`, a few of them.

    Args:
        device: its number, as st_rdev has it.
    """
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            opened = any(_is_device(entry, device) for entry in (process / "fd").iterdir())
        except OSError:
            continue  # it has ended, or is not ours to look at
        if opened:
            name = clean_text((try_read_text(process / "comm") or "?").strip())
            found.append(f"{name} ({process.name})")
            if len(found) >= _PROCESSES_NAMED_MAX:
                break
    return found


def _is_device(path: Path, device: int) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISBLK(status.st_mode) and status.st_rdev == device
