# SPDX-License-Identifier: Apache-2.0
"""Whether another user can decide what a path leads to, before root goes there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LINKS_MAX: Final = 40
"""As many as the kernel follows."""


def replaceable_by(path: Path, uid: int, gid: int) -> Path | None:
    """The first directory on the way to a path in which a user can put something else in place of
    what is there, or make what is not; None where there is none.

    Args:
        path: links in it are followed as the kernel follows them.
        uid, gid: of the user. Access control lists are not looked at.

    Raises:
        OSError: a directory cannot be looked at.
    """
    for directory, entry in _steps(path):
        status = directory.stat()
        is_writable = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and status.st_gid == gid
        )
        if status.st_uid == uid:
            return directory
        if is_writable and not (status.st_mode & stat.S_ISVTX and _is_others(entry, uid)):
            return directory
    return None


def _is_others(entry: Path, uid: int) -> bool:
    """Whether a sticky directory (/tmp) protects an entry from that user."""
    try:
        return entry.lstat().st_uid != uid
    except FileNotFoundError:
        return False


def _steps(path: Path) -> Iterator[tuple[Path, Path]]:
    """Each directory that the kernel looks into, without links, and what it looks for there."""
    at, names, links = Path("/"), list(path.absolute().parts[1:]), 0
    while names:
        name = names.pop(0)
        if name == "..":
            at = at.parent
            continue
        entry = at / name
        yield at, entry
        if not entry.is_symlink():
            at = entry
            if names and not entry.exists():
                return  # who may make it was just asked
        elif (links := links + 1) <= _LINKS_MAX:
            target = os.readlink(entry)
            names = [part for part in target.split("/") if part not in ("", ".")] + names
            at = Path("/") if target.startswith("/") else at
        else:
            return  # the kernel refuses it, too
