# SPDX-License-Identifier: Apache-2.0
"""A disk as slow as a common cloud volume: a loop device over a file, limited by the kernel.

The kernel lets swap-out pass a limit on the very device that is swapped to (it must not hold up
the freeing of memory). So the swap area of the last job lies on a second loop device over this
one: what arrives here is ordinary I/O, which is limited in both directions. The job with infiniswap
has its backup on this same device, the one with far memory has it on the disk as it is.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infiniswap.demo.children import Child, mortal, placed
from infiniswap.demo.leftovers import NO_LIMIT_BYTES, Record, device_number
from infiniswap.errors import (
    NotPermittedError,
    SystemCallError,
    UnavailableError,
    from_oserror,
)
from infiniswap.system import loop
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.files import try_read_text, try_write_text
from infiniswap.system.memory import memory_hierarchy
from infiniswap.system.programs import python
from infiniswap.system.throttle import CLOUD_VOLUME, blkio_root, set_limits_v1, set_limits_v2

_PROBE_S_MAX = 30.0
_TOLERANCE = 1.25
"""What the short probe may measure above the limit: the kernel accounts in slices of time."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What the probe measured: 4 KiB requests per second, at random places."""

    reads_per_s: float
    writes_per_s: float


def make_image(path: Path, size_bytes: int) -> None:
    """A file whose blocks are reserved.

    Raises:
        SystemCallError, NotPermittedError: no room.
    """
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        raise from_oserror(
            "cannot reserve space for the disk volume",
            error,
            where=str(path),
            mend="Free disk space, or name another directory with --dir.",
        ) from error


class Volume:
    """The disk, limited.

    Attributes:
        device: the loop device.
        not_limited: why it is as fast as the disk below; "" when it is limited.
        io_cgroups: what a process must be in for the limits to count for its I/O.
    """

    def __init__(self, device: loop.LoopDevice, record: Record) -> None:
        """Sets the limits. They are taken away with the volume, by its record.

        Raises:
            InfiniswapError: a cgroup cannot be made.
        """
        self.device = device
        self.not_limited = ""
        self.io_cgroups: tuple[Path, ...] = ()
        self._per_cgroup = False
        root = blkio_root()
        try:
            if root is not None:
                # Version 1: for all processes, in the root group, where kernel threads are as well.
                set_limits_v1(root, device_number(device), CLOUD_VOLUME)
                self.io_cgroups = (root,)
            elif _has_io_v2():
                cgroup = create_memory_cgroup(record.cgroup_name("io"), NO_LIMIT_BYTES)
                self._per_cgroup = True
                self.enter(cgroup)
                self.io_cgroups = (cgroup.path,)
            else:
                self.not_limited = "this kernel has no block I/O limits (blkio or io controller)"
        except (NotPermittedError, SystemCallError, UnavailableError) as error:
            self.not_limited = str(error)

    def enter(self, cgroup: MemoryCgroup) -> None:
        """Version 2 limits per cgroup: to be called for a job's cgroup that swaps to the volume.

        Raises:
            NotPermittedError, SystemCallError: the kernel's refusal.
        """
        if self._per_cgroup:
            set_limits_v2(cgroup.path, device_number(self.device), CLOUD_VOLUME)

    def job_cgroups(self, cgroup: MemoryCgroup) -> tuple[Path, ...]:
        """All that a job must be in which swaps to the volume."""
        return (cgroup.path,) if self._per_cgroup else (*self.io_cgroups, cgroup.path)


def _has_io_v2() -> bool:
    """Whether cgroups made at the top of version 2 can limit block I/O; asks for it."""
    hierarchy = memory_hierarchy()
    if hierarchy.version != 2:
        return False
    control = hierarchy.mount_point / "cgroup.subtree_control"
    if "io" not in (try_read_text(control) or "").split():
        return try_write_text(control, "+io")
    return True


def measure(device: loop.LoopDevice, cgroups: Sequence[Path], work: Path) -> Speed:
    """Reads and writes the device for a moment, from a process in these cgroups. Writes zeros:
    nothing must be on the device yet.

    Raises:
        SystemCallError, DeadlineError: the probe failed.
    """
    report = work / "probe.json"
    argv = python("-m", "infiniswap.demo.probe", str(device.path), str(report))
    command = mortal(placed(argv, cgroups), signal.SIGKILL)
    child = Child("the disk probe", command, work / "probe.log")
    try:
        child.check(child.wait(_PROBE_S_MAX, lambda: None, 0.1))
    finally:
        child.end(1.0)
    found = json.loads(report.read_text(encoding="ascii"))
    return Speed(found["reads_per_s"], found["writes_per_s"])


def too_fast(speed: Speed) -> str:
    """Why this is no cloud volume; "" when it is one (slower disks pass)."""
    reads, writes = CLOUD_VOLUME.read_requests_per_s, CLOUD_VOLUME.write_requests_per_s
    assert reads is not None
    assert writes is not None
    if speed.reads_per_s <= _TOLERANCE * reads and speed.writes_per_s <= _TOLERANCE * writes:
        return ""
    return (
        f"the kernel does not keep the limit: {speed.reads_per_s:.0f} reads and "
        f"{speed.writes_per_s:.0f} writes per second"
    )
