# SPDX-License-Identifier: Apache-2.0
"""Access control lists of files, without a library: acl(5), include/uapi/linux/posix_acl_xattr.h.

An owner may let further users and groups in without any capability, where handing a file to a group
that the owner is not in takes CAP_CHOWN.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

_NAME: Final = "system.posix_acl_access"
_VERSION: Final = 2
_ENTRY: Final = struct.Struct("<HHI")  # tag, permissions, number
_NOBODY: Final = 0xFFFF_FFFF
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_READ_WRITE: Final = 0o6


def let_group_in(path: Path, gid: int) -> None:
    """The owner and one group may read and write, nobody else anything.

    Args:
        path: a file of this process's user.
        gid: the group.

    Raises:
        OSError: the kernel's refusal; EOPNOTSUPP where the file system has no such lists.
    """
    nobody = (_GROUP_OBJ, 0, _NOBODY)
    _set(path, nobody, (_GROUP, _READ_WRITE, gid))


def let_user_in(path: Path, uid: int) -> None:
    """As let_group_in, one user."""
    nobody = (_GROUP_OBJ, 0, _NOBODY)
    _set(path, (_USER, _READ_WRITE, uid), nobody)


def group_of(path: Path) -> int:
    """The number of the group that is let in: by a list, or as the file's own.

    Raises:
        OSError: the file is not there.
    """
    try:
        value = os.getxattr(path, _NAME)
    except OSError:
        return path.stat().st_gid
    entries = _ENTRY.iter_unpack(value[struct.calcsize("<I") :])
    groups = [number for tag, _, number in entries if tag == _GROUP]
    return groups[0] if groups else path.stat().st_gid


def _set(path: Path, *between: tuple[int, int, int]) -> None:
    """The kernel wants the entries in the order of their tags."""
    entries = (
        (_USER_OBJ, _READ_WRITE, _NOBODY),
        *between,
        (_MASK, _READ_WRITE, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    value = struct.pack("<I", _VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    os.setxattr(path, _NAME, value)
