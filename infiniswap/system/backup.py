# SPDX-License-Identifier: Apache-2.0
"""Whether a path can hold a device's backup: checked before anything is attached.

It must lie on a disk, whatever is between (see storage), and its blocks must be its own from the
start. It holds the memory of whatever swaps there, so no other user may read it or put something
else in its place.

No remedy here deletes, empties or opens up what is not a device's own: the path may be a mistake.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import BackupError, DeadlineError, UnavailableError
from infiniswap.system.block import number_text, with_partitions
from infiniswap.system.extents import allocated_bytes
from infiniswap.system.files import PROC, SYS, try_read_text
from infiniswap.system.mounts import mount_of, mounts_of_device
from infiniswap.system.programs import finish
from infiniswap.system.storage import Layer, below_device, below_file
from infiniswap.system.swap import SWAP_LABEL_PREFIX, active_areas
from infiniswap.units import MIB, format_size, format_size_short

FREE_RESERVE_BYTES = 64 * MIB
"""Left free on the file system beside a new backup."""

_BLKID_AMBIVALENT = 8
MEND = "Name a file on a local disk (ext4 or xfs), or a partition of one, with --backup."
"""What helps against most refusals; more may follow."""

_MEND_FILE = "Name another file with --backup; one that does not exist is made for this user alone."


@dataclass(frozen=True, slots=True)
class BackupTarget:
    """A path that passed.

    Attributes:
        path: without links.
        is_block_device: else a regular file, which may not exist yet.
        exists: whether it does.
    """

    path: Path
    is_block_device: bool
    exists: bool


def check_backup(
    path: Path, size_bytes: int, *, proc: Path = PROC, sys: Path = SYS
) -> BackupTarget:
    """Checks that `path` can back a device of `size_bytes`.

    Nothing is created. The answer can be outdated by the time it is used; the engine's own open,
    lock and preallocation are what counts in the end.

    Raises:
        BackupError: it cannot; says why and what to do.
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    named = os.path.abspath(path)
    resolved = Path(os.path.realpath(os.path.dirname(named)), os.path.basename(named))
    try:
        link = _link(resolved)
        if link is not None:
            resolved = link
        attributes = os.stat(resolved)
    except FileNotFoundError:
        _check_file(resolved, None, size_bytes, proc, sys)
        return BackupTarget(resolved, is_block_device=False, exists=False)
    except OSError as error:
        raise _from_oserror(error, resolved) from error
    if stat.S_ISBLK(attributes.st_mode):
        _check_block_device(resolved, attributes, size_bytes, proc, sys)
        return BackupTarget(resolved, is_block_device=True, exists=True)
    if not stat.S_ISREG(attributes.st_mode):
        raise BackupError(
            "it is neither a regular file nor a block device", where=str(resolved), mend=MEND
        )
    _check_file(resolved, attributes, size_bytes, proc, sys)
    return BackupTarget(resolved, is_block_device=False, exists=True)


def _link(path: Path) -> Path | None:
    """The block device that a symbolic link leads to (/dev/disk/by-id/...); None: it is no link.

    Raises:
        BackupError: it leads to anything else, or another user says where it leads.
        OSError: there is nothing.
    """
    attributes = os.lstat(path)
    if not stat.S_ISLNK(attributes.st_mode):
        return None
    target = Path(os.path.realpath(path))
    if not target.is_block_device():
        raise BackupError(
            "it is a symbolic link, which may lead to another file later",
            where=str(path),
            mend="Name the file itself with --backup. (A link to a block device is allowed.)",
        )
    if attributes.st_uid not in (0, os.geteuid()):
        raise BackupError(
            f"it is a symbolic link of another user ({attributes.st_uid}), who could change which "
            "device it leads to",
            where=str(path),
            mend=f"Name the device with --backup, or a link to it below /dev/disk ({target} now).",
        )
    _check_directory(path)
    return target


def _check_directory(path: Path) -> None:
    mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise BackupError(
            f"every user may write to its directory (mode {stat.S_IMODE(mode):04o}), and so "
            "replace it",
            where=str(path),
            mend="Name a file in another directory with --backup.",
        )


def check_private(path: Path, *, is_ours: bool) -> None:
    """Checks that a backup that exists is nobody else's and read by nobody else. The engine looks
    again at what it has opened (csrc/engine/backup/open.c).

    Args:
        path: a file or block device that has passed check_backup.
        is_ours: this device has written to it before.

    Raises:
        BackupError: other users have rights to it.
    """
    try:
        attributes = os.stat(path)
    except OSError as error:
        raise _from_oserror(error, path) from error
    mode, is_disk = attributes.st_mode, stat.S_ISBLK(attributes.st_mode)
    others = stat.S_IRWXO if is_disk else stat.S_IRWXG | stat.S_IRWXO
    if attributes.st_uid != os.geteuid() and not (is_disk and attributes.st_uid == 0):
        what = f"it belongs to another user ({attributes.st_uid})"
    elif mode & others:
        what = f"other users may read or write it (mode {stat.S_IMODE(mode):04o})"
    elif not is_disk and attributes.st_nlink != 1:
        what = f"the file has {attributes.st_nlink} names (hard links)"
    else:
        return
    mend = MEND if is_disk else _MEND_FILE
    if is_ours and mode & others:
        mend = f"Run: chmod {'o' if is_disk else 'go'}= {path}."
    elif is_ours:
        mend = "Make it this user's alone again: see `ls -l` and `find -samefile`."
    raise BackupError(what, where=str(path), mend=mend)


def check_has_no_data(path: Path, *, timeout_s: float = 30.0) -> None:
    """Checks that a block device holds nothing that others know by its first bytes: a file
    system, a partition table, RAID, LVM, encryption, somebody's swap space. What an earlier device
    of ours left there does not count. Without `blkid` (util-linux) nothing is checked.

    Raises:
        BackupError: it holds something; as a backup it would be overwritten.
        DeadlineError: the device does not answer.
    """
    argv = ["blkid", "--probe", "--output", "export", str(path)]
    try:
        done = finish(argv, timeout_s=timeout_s)
    except UnavailableError:
        return
    except DeadlineError as error:
        raise DeadlineError(
            f"reading its first bytes took more than {timeout_s:.0f} s", where=str(path), mend=MEND
        ) from error
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    kind = found.get("TYPE") or found.get("PTTYPE")
    if done.code == _BLKID_AMBIVALENT:
        kind = "more than one file system or table"
    if kind is None or (kind == "swap" and found.get("LABEL", "").startswith(SWAP_LABEL_PREFIX)):
        return
    what = f"a partition table ({kind})" if "TYPE" not in found and "PTTYPE" in found else kind
    raise BackupError(
        f"the device holds {what}, which a backup would overwrite",
        where=str(path),
        mend="Name another one with --backup: one on which `blkid` finds nothing.",
    )


def _from_oserror(error: OSError, path: Path) -> BackupError:
    reason = os.strerror(error.errno or errno.EIO)
    return BackupError(f"the backup cannot be used: {reason}", where=str(path), mend=MEND)


def _check_layers(path: Path, layers: Iterator[Layer]) -> None:
    for depth, layer in enumerate(layers):
        if layer.refusal:
            subject = f"it lies on {layer.name}, which" if depth else "it"
            raise BackupError(
                f"{subject} {layer.refusal}", where=str(path), mend=f"{MEND} {layer.mend}".strip()
            )


def _check_file(
    path: Path, existing: os.stat_result | None, size_bytes: int, proc: Path, sys: Path
) -> None:
    directory = path.parent
    if not directory.is_dir():
        raise BackupError(
            "its directory does not exist",
            where=str(path),
            mend=f"Make it (mkdir -p {directory}), or name another with --backup.",
        )
    _check_directory(path)
    place = path if existing else directory
    _check_layers(path, below_file(place, proc=proc, sys=sys))
    mount = mount_of(place, proc=proc)
    if mount.read_only:
        raise BackupError(
            f"the file system at {mount.mount_point} is mounted read-only",
            where=str(path),
            mend=f"Remount it (mount -o remount,rw {mount.mount_point}), or name another file "
            "with --backup.",
        )
    if not os.access(place, os.W_OK):
        raise _unwritable(path, (existing or os.stat(directory)).st_uid)
    _check_not_swap(path, existing, proc)
    _check_space(path, existing, size_bytes)


def _unwritable(path: Path, owner: int) -> BackupError:
    if os.geteuid() != 0 or owner == 0:
        what, mend = "this user may not write there", "Run it as root, or name another file"
    else:
        what = (
            f"a device may not write there: it has not all of root's rights, and user {owner} owns "
            "that place"
        )
        mend = "Name a file in a directory of root's"
    return BackupError(what, where=str(path), mend=f"{mend} with --backup.")


def _check_space(path: Path, existing: os.stat_result | None, size_bytes: int) -> None:
    try:
        space = os.statvfs(path.parent)
    except OSError as error:
        raise _from_oserror(error, path) from error
    have_bytes = allocated_bytes(path, existing, size_bytes) if existing else 0
    free_bytes = space.f_bavail * space.f_frsize
    if have_bytes >= size_bytes:
        return
    needed_bytes = size_bytes - have_bytes + FREE_RESERVE_BYTES
    if free_bytes < needed_bytes:
        raise BackupError(
            f"the backup needs {format_size_short(needed_bytes)} and only "
            f"{format_size_short(free_bytes)} are free on its file system",
            where=str(path),
            mend="Free space there, name another file with --backup, or ask for a smaller device.",
        )


def _check_not_swap(path: Path, existing: os.stat_result | None, proc: Path) -> None:
    if existing is None:
        return
    for area in active_areas(proc=proc):
        try:
            other = os.stat(area.path)
        except OSError:
            continue
        same_device = stat.S_ISBLK(existing.st_mode) and other.st_rdev == existing.st_rdev
        same_file = (other.st_dev, other.st_ino) == (existing.st_dev, existing.st_ino)
        if same_file or (same_device and stat.S_ISBLK(other.st_mode)):
            raise BackupError(
                "it is an active swap area itself",
                where=str(path),
                mend=f"Remove it from there first: swapoff {area.path}.",
            )


def _check_block_device(
    path: Path, attributes: os.stat_result, size_bytes: int, proc: Path, sys: Path
) -> None:
    device = number_text(attributes.st_rdev)
    directory = sys / "dev" / "block" / device
    for number in with_partitions(device, sys=sys):
        for mount in mounts_of_device(number, proc=proc, sys=sys):
            raise BackupError(
                f"the device is mounted at {mount.mount_point}",
                where=str(path),
                mend=f"Unmount it (umount {mount.mount_point}), or name another device; its "
                "contents would be overwritten.",
            )
    _check_not_swap(path, attributes, proc)
    _check_layers(path, below_device(device, proc=proc, sys=sys))
    if (try_read_text(directory / "ro") or "0").strip() == "1":
        raise BackupError("the device is read-only", where=str(path), mend=MEND)
    have_bytes = int(try_read_text(directory / "size") or "0") * 512
    if have_bytes < size_bytes:
        raise BackupError(
            f"the device has {format_size_short(have_bytes)}, the backup needs "
            f"{format_size_short(size_bytes)}",
            where=str(path),
            mend=f"Name a larger one, or ask for a device of {format_size(have_bytes)} or less.",
        )
    _check_free_for_us(path)


def _check_free_for_us(path: Path) -> None:
    """O_EXCL on a block device fails while the kernel itself uses it: RAID, LVM, a partition."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BackupError(
                "the device is in use (mounted elsewhere, or part of RAID, LVM or encryption)",
                where=str(path),
                mend="See what uses it with lsblk, or name another device.",
            ) from error
        raise _from_oserror(error, path) from error
    os.close(descriptor)
