# SPDX-License-Identifier: Apache-2.0
"""Mounted file systems: which one a path lies on, mounting a tmpfs, and unmounting."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import SystemCallError, from_oserror
from infiniswap.system.files import PROC, read_text, unescape

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


def mounts_of_device(device: str, *, proc: Path = PROC) -> tuple[Mount, ...]:
    """Mounts of the block device "major:minor"."""
    return tuple(mount for mount in mounts(proc=proc) if mount.device == device)


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
