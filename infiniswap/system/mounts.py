# SPDX-License-Identifier: Apache-2.0
"""Mounted file systems: which one a path lies on, mounting a tmpfs, and unmounting."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import SystemCallError, from_oserror
from infiniswap.system.block import entries, number_text
from infiniswap.system.files import PROC, SYS, read_text, try_read_text, unescape

FUSE_TYPE = "fuse.infiniswap"
"""File system type of the fuse front end's mounts."""

TMPFS_OPTIONS = ("huge=advise", "noswap")
"""Of a tmpfs for slabs, as far as the kernel knows them: huge pages for mappings that ask for them
(needs transparent huge pages), and no page of it is ever swapped out (Linux 6.4)."""

_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REMOUNT = 32
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    Attributes:
        device: "major:minor" of the file system.
        root: what of the file system is mounted, "/" for all of it.
        mount_point: where, as the reading process sees it.
        options, super_options: of the mount, of the file system.
    """

    device: str
    root: str
    mount_point: str
    options: frozenset[str]
    fs_type: str
    source: str
    super_options: frozenset[str]

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written there."""
        return "ro" in self.options or "ro" in self.super_options


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Mounts in the order of the kernel (a later one hides an earlier one at the same place).

    Lines that are not of the documented form (proc(5)) are left out.
    """
    mounts: list[Mount] = []
    for line in text.split("\n"):
        fields = line.split(" ")
        if len(fields) < 10 or "-" not in fields[6:]:
            continue
        dash = fields.index("-", 6)
        if len(fields) < dash + 4:
            continue
        mounts.append(
            Mount(
                device=fields[2],
                root=unescape(fields[3]),
                mount_point=unescape(fields[4]),
                options=frozenset(fields[5].split(",")),
                fs_type=unescape(fields[dash + 1]),
                source=unescape(fields[dash + 2]),
                super_options=frozenset(unescape(fields[dash + 3]).split(",")),
            )
        )
    return tuple(mounts)


def mounts(*, proc: Path = PROC) -> tuple[Mount, ...]:
    """What is mounted in this process's mount namespace.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    return parse_mountinfo(read_text(proc / "self" / "mountinfo", "cannot read the mount table"))


def mount_of(path: Path, *, proc: Path = PROC) -> Mount:
    """The mount that `path` (which need not exist) lies on.

    Raises:
        SystemCallError: not even "/" is in the mount table.
    """
    wanted = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts(proc=proc):
        prefix = mount.mount_point.rstrip("/") + "/"
        holds = wanted == mount.mount_point or wanted.startswith(prefix)
        if holds and (best is None or len(mount.mount_point) >= len(best.mount_point)):
            best = mount
    if best is None:
        raise SystemCallError("it lies on no mounted file system", where=str(path))
    return best


def mounts_of_device(device: str, *, proc: Path = PROC, sys: Path = SYS) -> tuple[Mount, ...]:
    """Mounts of the block device "major:minor", and of a btrfs that has it among its
    devices."""
    devices = {device}
    for system in entries(sys / "fs" / "btrfs"):
        texts = (try_read_text(entry / "dev") for entry in entries(system / "devices"))
        members = {text.strip() for text in texts if text is not None}
        if device in members:
            devices |= members

    def is_there(mount: Mount) -> bool:
        # A btrfs has a number of its own there: what tells is the source, one of its devices.
        return mount.device == device or (
            mount.device.startswith("0:")
            and mount.source.startswith("/dev/")
            and _number(Path(mount.source)) in devices
        )

    return tuple(filter(is_there, mounts(proc=proc)))


def _number(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return number_text(status.st_rdev) if stat.S_ISBLK(status.st_mode) else ""


def infiniswap_mounts(*, proc: Path = PROC) -> tuple[Mount, ...]:
    """Mounts of the fuse front end."""
    return tuple(mount for mount in mounts(proc=proc) if mount.fs_type == FUSE_TYPE)


def _mount(source: str, point: Path, fs_type: str, flags: int, options: str) -> int:
    """mount(2), without a child process; 0 or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (source.encode(), os.fsencode(point), fs_type.encode())
    result = libc.mount(*arguments, ctypes.c_ulong(flags), options.encode())
    return 0 if result == 0 else ctypes.get_errno()


def mount_tmpfs(
    mount_point: Path, size_bytes: int, *, mode: int, owner: tuple[int, int] | None = None
) -> tuple[str, ...]:
    """Mounts a tmpfs with TMPFS_OPTIONS.

    Args:
        mount_point: where.
        size_bytes: how much it may hold.
        mode: of its top directory.
        owner: user and group of that directory; None: the caller's.

    Returns:
        Those that this kernel does not know.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    basic = f"size={size_bytes},mode={mode:o}"
    if owner is not None:
        basic += f",uid={owner[0]},gid={owner[1]}"
    code = 0
    # From all to none; of two, each on its own.
    for missing in ((), ("noswap",), ("huge=advise",), TMPFS_OPTIONS):
        wanted = [option for option in TMPFS_OPTIONS if option not in missing]
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        code = _mount("infiniswap", mount_point, "tmpfs", flags, ",".join([basic, *wanted]))
        if code == 0:
            return missing
        if code != errno.EINVAL:
            break
    raise from_oserror(
        "cannot mount a tmpfs", OSError(code, os.strerror(code)), where=str(mount_point)
    )


def resize_tmpfs(mount_point: Path, size_bytes: int) -> None:
    """Changes how much a tmpfs may hold.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal (EINVAL: it holds more).
    """
    flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    code = _mount("infiniswap", mount_point, "tmpfs", flags, f"size={size_bytes}")
    if code != 0:
        raise from_oserror(
            "cannot change the size of the tmpfs",
            OSError(code, os.strerror(code)),
            where=str(mount_point),
        )


def unmount(mount_point: Path, *, lazy: bool = False) -> None:
    """umount(2), without a child process.

    Args:
        mount_point: where.
        lazy: take it out of the tree now even if it is in use.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal (EBUSY: in use; EINVAL: no mount).
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mount_point), flags) != 0:
        code = ctypes.get_errno()
        raise from_oserror(
            "cannot unmount", OSError(code, os.strerror(code)), where=str(mount_point)
        )
