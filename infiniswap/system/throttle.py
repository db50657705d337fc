# SPDX-License-Identifier: Apache-2.0
"""Slows a block device down to a cloud volume's speed, for comparisons, and undoes it.

Version 1 of the block I/O controller can limit a device in the root cgroup, where everything
counts. Version 2 has no limits there; it needs the cgroup that does the I/O.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import InfiniswapError, UnavailableError, UsageError
from infiniswap.system.files import PROC, read_text, write_text
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


def parse_v1(text: str, device: str) -> int | None:
    """The device's value in a blkio.throttle.* file, None when it has none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == device and value.strip().isdecimal():
            return int(value)
    return None


def parse_v2(text: str, device: str) -> IoLimits:
    """The device's values in an io.max file."""
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == device:
            pairs = dict(item.partition("=")[::2] for item in rest.split())
            values = (pairs.get(key, "max") for key in _NAMES_V2)
            return IoLimits(*(int(value) if value.isdecimal() else None for value in values))
    return IoLimits()


def _check(device: str, limits: IoLimits) -> None:
    if not re.fullmatch(r"[0-9]+:[0-9]+", device, re.ASCII):
        raise UsageError(f"{device!r} is not a device number (MAJOR:MINOR)")
    if any(value is not None and value <= 0 for value in _values(limits)):
        raise UsageError("a limit of zero would stop the device")


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


def get_limits_v1(directory: Path, device: str) -> IoLimits:
    """What set_limits_v1 has set.

    Raises:
        NotPermittedError, SystemCallError: unreadable.
    """
    return IoLimits(
        *(
            parse_v1(read_text(_v1_file(directory, name), "cannot read the limits"), device)
            for name in _NAMES_V1
        )
    )


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


@contextlib.contextmanager
def throttled(
    device: str, limits: IoLimits, *, cgroup_v2: Path | None = None, proc: Path = PROC
) -> Iterator[None]:
    """Limits a device within the block, then puts back what was there.

    Args:
        device: "major:minor" of a whole device.
        limits: the bounds.
        cgroup_v2: the cgroup whose I/O to limit where only version 2 is there.
        proc: root of the proc file system.

    Raises:
        UsageError: no device number, or a limit of zero.
        UnavailableError: this host cannot do it.
        NotPermittedError, SystemCallError: the kernel's refusal; nothing stays limited.
    """
    _check(device, limits)
    root = blkio_root(proc=proc)
    if root is not None:
        before = get_limits_v1(root, device)
        try:
            set_limits_v1(root, device, limits)
            yield
        finally:
            _restore_v1(root, device, before)
        return
    if cgroup_v2 is None or not (cgroup_v2 / "io.max").exists():
        raise UnavailableError(
            "a block device cannot be slowed down for everybody here: the block I/O controller "
            "of cgroup version 1 is not there",
            mend="Mount it (mount -t cgroup -o blkio none DIRECTORY) where version 2 does not "
            "use it.",
        )
    before = parse_v2(read_text(cgroup_v2 / "io.max", "cannot read the limits"), device)
    try:
        set_limits_v2(cgroup_v2, device, limits)
        yield
    finally:
        with contextlib.suppress(InfiniswapError):  # the cgroup or the device may be gone
            set_limits_v2(cgroup_v2, device, before)


def _restore_v1(root: Path, device: str, before: IoLimits) -> None:
    with contextlib.suppress(InfiniswapError):  # a device that is gone has taken its limits along
        set_limits_v1(root, device, before)
