# SPDX-License-Identifier: Apache-2.0
"""Slows a block device down to a cloud volume's speed, for comparisons.

Version 1 of the block I/O controller can limit a device in the root cgroup, where everything
counts. Version 2 has no limits there; it needs the cgroup that does the I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infiniswap.system.files import PROC, write_text
from infiniswap.system.mounts import mounts


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Upper bounds per second, None for none."""

    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    read_requests_per_s: int | None = None
    write_requests_per_s: int | None = None


CLOUD_VOLUME = IoLimits(125_000_000, 125_000_000, 3000, 3000)
"""A common cloud volume."""

_NAMES_V1 = ("read_bps", "write_bps", "read_iops", "write_iops")
_NAMES_V2 = ("rbps", "wbps", "riops", "wiops")


def _values(limits: IoLimits) -> tuple[int | None, ...]:
    return (
        limits.read_bytes_per_s,
        limits.write_bytes_per_s,
        limits.read_requests_per_s,
        limits.write_requests_per_s,
    )


def _v1_file(directory: Path, name: str) -> Path:
    return directory / f"blkio.throttle.{name}_device"


def set_limits_v1(directory: Path, device: str, limits: IoLimits) -> None:
    """Writes the limits for "major:minor" in a blkio cgroup (0 in the file means none).

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    for name, value in zip(_NAMES_V1, _values(limits), strict=True):
        text = f"{device} {0 if value is None else value}"
        write_text(_v1_file(directory, name), text, "cannot limit the device")


def set_limits_v2(cgroup: Path, device: str, limits: IoLimits) -> None:
    """Writes the limits for "major:minor" in a cgroup's io.max.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    pairs = (
        f"{name}={'max' if value is None else value}"
        for name, value in zip(_NAMES_V2, _values(limits), strict=True)
    )
    write_text(cgroup / "io.max", f"{device} {' '.join(pairs)}", "cannot limit the device")


def blkio_root(*, proc: Path = PROC) -> Path | None:
    """Where version 1 can limit a device for everybody, None where it cannot."""
    for mount in mounts(proc=proc):
        if mount.fs_type == "cgroup" and "blkio" in mount.super_options:
            directory = Path(mount.mount_point)
            if _v1_file(directory, "read_bps").exists():
                return directory
    return None
