# SPDX-License-Identifier: Apache-2.0
"""Who uses a block device (backups of other devices, mounts, loop devices, LVM, swap areas,
processes), so that none in use is removed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from infiniswap.control.text import clean_text
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import ConflictError, InfiniswapError
from infiniswap.system import block, loop, mounts, storage, swap
from infiniswap.system.files import SYS, try_read_text

_BRIEF_USE_S = 2.0
_PROCESSES_NAMED_MAX = 5


def check_unused(path: Path, spec: DeviceSpec, *, removes: bool) -> None:
    """Looks who uses a device that serves. The kernel would not refuse to detach it: it detaches a
    loop device later, when the last user is gone.

    Args:
        path: its block device.
        spec: of the infiniswap device.
        removes: its contents are not kept, so backups of stopped devices count, too.

    Raises:
        ConflictError: who uses it.
    """
    device, where = path.stat().st_rdev, f"device {spec.name}"
    for other, verb in _backups_on(block.number_text(device), spec, removes):
        raise ConflictError(
            f"the backup of device {other} lies on it",
            where=where,
            mend=f"{verb.capitalize()} that device first: infiniswap device {verb} {other}.",
        )
    for what, mend in _kernel_users(device):
        raise ConflictError(what, where=where, mend=mend)
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
            f"the kernel uses it ({error.strerror}), perhaps mounted in a container",
            where=where,
            mend=f"See what it is with lsblk {path}.",
        ) from error


def _backups_on(number: str, own: DeviceSpec, removes: bool) -> Iterator[tuple[str, str]]:
    """Names of the other devices whose backup lies on a block device, and what ends that."""
    run_dir, store = own.config.device.run_dir, own.config.device.backup_dir
    running = [(name, "stop", rundir.read_record) for name in rundir.running_names(run_dir)]
    stopped = [(name, "remove", rundir.read_kept) for name in rundir.stopped_names(run_dir, store)]
    for name, verb, read in running + (stopped if removes else []):
        if name == own.name:
            continue
        with contextlib.suppress(InfiniswapError):  # then what has it open is named
            spec = read(rundir.DevicePaths(name, run_dir / name, store))
            if spec is not None and spec.backup and storage.lies_on(Path(spec.backup), number):
                yield name, verb


def _kernel_users(device: int) -> Iterator[tuple[str, str]]:
    """What the kernel itself has on a block device or its partitions, which no process need have
    open: sentences that say so, each with its remedy."""
    for number in block.with_partitions(block.number_text(device)):
        points = [mount.mount_point for mount in mounts.mounts_of_device(number)]
        if points:
            yield f"it is mounted at {', '.join(points)}", f"Unmount it: umount {points[0]}."
        for upper in loop.attached():
            if _is_on(upper, number):
                yield (
                    f"the loop device {upper.path} lies on it",
                    f"Unmount what is mounted from that, and run: losetup --detach {upper.path}.",
                )
        for holder in block.entries(SYS / "dev" / "block" / number / "holders"):
            called = (try_read_text(holder / "dm" / "name") or "").strip()
            yield (
                f"/dev/{holder.name} lies on it{f' ({clean_text(called)})' if called else ''}",
                f"See what that is with lsblk /dev/{holder.name}, and take it away first.",
            )


def _is_on(upper: loop.LoopDevice, number: str) -> bool:
    # No file elsewhere is looked at: its file system may never answer.
    if not upper.backing.startswith("/dev/"):
        return False
    try:
        status = os.stat(upper.backing)
    except OSError:
        return False
    return stat.S_ISBLK(status.st_mode) and block.number_text(status.st_rdev) == number


def check_left_unused(path: Path, name: str, mend: str) -> None:
    """Looks who uses a block device that a killed process of a device has left.

    Args:
        path: the block device; nothing is wrong when it is gone.
        name: of the infiniswap device.
        mend: what to do about swap space there.

    Raises:
        ConflictError: it is swap space whose contents are gone, or something lies on it.
    """
    where = f"device {name}"
    if swap.find_area(path) is not None:
        raise ConflictError(
            f"{path} is swap space of an earlier process of this device that died",
            where=where,
            mend=mend,
        )
    try:
        device = path.stat().st_rdev
    except OSError:
        return
    for what, remedy in _kernel_users(device):
        raise ConflictError(
            f"{path} is left of an earlier process of this device that died, and {what}",
            where=where,
            mend=remedy.replace("umount ", "umount -l "),
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
