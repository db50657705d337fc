# SPDX-License-Identifier: Apache-2.0
"""What a file or block device lies on, down to the disks, and what cannot hold a backup there.

A backup is the one copy that survives the loss of every donor, and it is written under memory
pressure. So every layer below it must be a disk or lie on one: memory and network can be lost or
need the memory that swapping is to free, a layer that allocates on a write may find no room, and a
layer that a process serves waits for that process.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from infiniswap.system import block, loop
from infiniswap.system.extents import allocated_bytes
from infiniswap.system.files import PROC, SYS, try_read_text
from infiniswap.system.mounts import FUSE_TYPE, Mount, mount_of
from infiniswap.units import format_size_short

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "afs", "gfs2", "ocfs2"}
    | {"lustre", "beegfs", "glusterfs", "orangefs", "pvfs2", "coda"}
)
_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2", "f2fs"})
_LAYERED = frozenset({"overlay", "aufs", "unionfs", "ecryptfs"})
_READ_ONLY = frozenset({"squashfs", "iso9660", "erofs", "cramfs", "udf"})
_PSEUDO = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "devpts", "bpf"})

_VERY_MEMORY: Final = "the very memory that swapping is to free"
_SERVED: Final = "is served by another process or host"
_DEVICES: Final = {
    "zram": f"is {_VERY_MEMORY}",
    "ram": f"is {_VERY_MEMORY}",
    "nbd": _SERVED,
    "ublkb": _SERVED,
    "rbd": "lies on the network, which may be lost with the donors",
    "drbd": "waits for another host at each write",
}
"""What is wrong with a block device whose name is one of these and a number."""

_DRIVER = re.compile(r"([a-z-]+?)[0-9]+\Z", re.ASCII)
_POOL = re.compile(r"stratis-.*thin|-[tv]pool\Z|-cow\Z")
"""Device-mapper UUIDs of what gives out its room at the first write: thin pools (LVM, Stratis), VDO
and the changes of LVM snapshots."""

ONLY_COPY_ON_WRITE: Final = (
    "A host that has only such file systems needs a partition for it. Or it does without, with "
    "--backup none: pages are then lost with their donor, and so is the program whose memory they "
    "held."
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A block device or a file, somewhere below a backup.

    Attributes:
        number: "major:minor" of the block device, or of the one that the file's file system is on.
        name: its path.
        refusal: what is wrong with it, as a predicate ("lies in memory"); empty: nothing.
        mend: what to do about that if there is no other place; empty: nothing.
    """

    number: str
    name: str
    refusal: str = ""
    mend: str = ""


def refusal_of_file_system(mount: Mount) -> str:
    """Says, as a predicate, why no file on this file system can be a backup; "" when one can."""
    kind = mount.fs_type
    if kind == FUSE_TYPE:
        return f"lies on an Infiniswap device ({kind}), whose pages donors have"
    if kind in _MEMORY:
        return f"lies in memory ({kind}), {_VERY_MEMORY}"
    if kind in _NETWORK:
        return f"lies on a network file system ({kind}), which may be lost with the donors"
    if kind in _COPY_ON_WRITE:
        return (
            f"lies on a copy-on-write file system ({kind}), which needs memory and new blocks for "
            "every write"
        )
    if kind in _LAYERED:
        return f"lies on a layered file system ({kind}), as a container's own files do"
    if kind == "fuseblk" or kind.split(".")[0] == "fuse":
        return f"lies on a file system served by another process ({kind})"
    if kind in _READ_ONLY:
        return f"lies on a read-only file system ({kind})"
    if kind in _PSEUDO:
        return f"lies on a file system that holds no files of ours ({kind})"
    if mount.device.startswith("0:"):
        return f"lies on a file system without a disk of its own ({kind})"
    return ""


def below_file(path: Path, *, proc: Path = PROC, sys: Path = SYS) -> Iterator[Layer]:
    """The file, which need not exist, and everything below it, from the top down.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    file = _file(path, proc)
    yield file
    if not file.refusal:
        yield from below_device(file.number, proc=proc, sys=sys)


def below_device(number: str, *, proc: Path = PROC, sys: Path = SYS) -> Iterator[Layer]:
    """The block device and everything below it: of a partition its disk, of a loop device its file,
    of LVM, encryption and RAID their parts. Goes no further below what cannot hold a backup.

    Args:
        number: "major:minor".
        proc: root of the proc file system.
        sys: root of the sys file system.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    seen: set[str] = set()
    left = [number]
    while left:
        now = left.pop()
        if now in seen:
            continue
        seen.add(now)
        device, file, below = _device(now, proc, sys)
        yield device
        if file is not None:
            yield file
        left += below


def lies_on(path: Path, number: str) -> bool:
    """Whether a file or block device of this host lies on the block device "major:minor", or is it.

    Raises:
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    if stat.S_ISBLK(status.st_mode):
        layers = below_device(block.number_text(status.st_rdev))
    else:
        layers = below_file(path)
    return any(layer.number == number for layer in layers)


def _file(path: Path, proc: Path) -> Layer:
    mount = mount_of(path, proc=proc)
    refusal = refusal_of_file_system(mount)
    is_alone = mount.fs_type in _COPY_ON_WRITE
    return Layer(mount.device, str(path), refusal, ONLY_COPY_ON_WRITE if is_alone else "")


def _device(number: str, proc: Path, sys: Path) -> tuple[Layer, Layer | None, list[str]]:
    """A block device, the file below it, and the numbers of block devices below either."""
    node = Path(os.path.realpath(sys / "dev" / "block" / number))
    layer = Layer(number, f"/dev/{node.name}")
    if not node.is_dir():
        refusal = f"is not in {sys}, so that nobody can see what it lies on"
        return Layer(number, f"the block device {number}", refusal), None, []
    if (node / "partition").exists():
        return layer, None, [_number(node.parent)]
    driver = _DRIVER.match(node.name)
    kind = driver[1] if driver else ""
    if refusal := _DEVICES.get(kind, ""):
        return replace(layer, refusal=refusal), None, []
    if kind == "loop":
        return _loop(layer, node, proc, sys)
    if _POOL.search((try_read_text(node / "dm" / "uuid") or "").strip()):
        refusal = "is a pool that gives out its room at the first write, and may have none then"
        return replace(layer, refusal=refusal), None, []
    below = sorted(_number(entry) for entry in block.entries(node / "slaves"))
    if not below and kind in ("dm-", "md"):
        return replace(layer, refusal="lies on no disk"), None, []
    return layer, None, below


def _number(node: Path) -> str:
    return (try_read_text(node / "dev") or "").strip()


def _loop(layer: Layer, node: Path, proc: Path, sys: Path) -> tuple[Layer, Layer | None, list[str]]:
    device = loop.loop_device(int(node.name.removeprefix("loop")), sys=sys)
    if device is None:
        return replace(layer, refusal="is attached to no file"), None, []
    path = Path(device.backing)
    status = None if device.deleted else _status(path)
    if status is None or not loop.is_on(device, status):
        refusal = f"is attached to the file {path}, which is deleted or not visible from here"
        return replace(layer, refusal=refusal), None, []
    if stat.S_ISBLK(status.st_mode):
        return layer, None, [block.number_text(status.st_rdev)]
    file = _file(path, proc)
    reserved_bytes = 0 if file.refusal else allocated_bytes(path, status, status.st_size)
    if not file.refusal and reserved_bytes < status.st_size:
        left_bytes = status.st_size - reserved_bytes
        file = replace(
            file,
            refusal=f"is a sparse file: {format_size_short(left_bytes)} of it have no room on "
            "their file system yet",
            mend=f"Or reserve that file's blocks: fallocate --length {status.st_size} {path}.",
        )
    return layer, file, [] if file.refusal else [file.number]


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
