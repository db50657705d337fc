# SPDX-License-Identifier: Apache-2.0
"""The swap areas that are compared: ours, nbdfuse, the floor of FUSE, disks, zram."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infiniswap.errors import InfiniswapError
from infiniswap.system import loop, swap
from infiniswap.system.files import SYS, try_read_text
from infiniswap.system.programs import run_command
from infiniswap.system.throttle import CLOUD_VOLUME, IoLimits, blkio_root, set_limits_v1
from infiniswap.units import MIB
from isw_bench.bench import START_S, Bench, SkipError, nbdkit_memory, require_programs
from isw_bench.children import Child
from isw_bench.cluster import Device, device, donors
from isw_bench.scope import note_loop, remove_zram

OURS, NBDFUSE, FLOOR = "infiniswap", "nbdfuse", "FUSE floor"
DISK, CLOUD, ZRAM = "disk", "cloud volume", "zram"

_LABEL = "isw-bench"


@dataclass(frozen=True, slots=True)
class Area:
    """A swap area that can be switched on.

    Attributes:
        name: for the table.
        path: block device or file, with a swap header.
        settle: returns when what was swapped out has come to rest.
        counters: totals to compare before and after, by name.
    """

    name: str
    path: Path
    settle: Callable[[], None]
    counters: Callable[[], dict[str, int]] = dict


def _made(bench: Bench, name: str, path: Path, device_name: str = "") -> Area:
    swap.mkswap(path, label=_LABEL)
    return Area(name, path, lambda: _await_idle(bench, device_name or path.name))


def _await_idle(bench: Bench, block_device: str) -> None:
    """Until the kernel has no request under way on it."""

    def idle() -> bool:
        fields = (try_read_text(SYS / "block" / block_device / "inflight") or "0 0").split()
        return not any(int(field) for field in fields)

    bench.until(idle, f"the requests of {block_device}")


@contextlib.contextmanager
def looped(bench: Bench, backing: Path, *, is_disk: bool = False) -> Iterator[loop.LoopDevice]:
    """A loop device as the product makes it, or over a disk."""
    with bench.scope.interrupts.hold():
        upper = loop.attach(backing)
        note_loop(bench.work, upper)
    try:
        loop.tune(upper, is_disk=is_disk)
        yield upper
    finally:
        with bench.scope.interrupts.hold():
            loop.detach(upper)


def image(bench: Bench, name: str) -> Path:
    """A file of an area's size whose blocks are reserved."""
    path = bench.work / name
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.truncate(bench.settings.swap_device_bytes)
        os.posix_fallocate(file.fileno(), 0, bench.settings.swap_device_bytes)
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def ours(bench: Bench) -> Iterator[Area]:
    """A device with two donors and its backup file, as `device start` makes it; every slab is
    mapped before it is used."""
    slab_bytes = max(MIB, bench.settings.swap_device_bytes // 16)
    with (
        donors(bench, 2, slab_bytes, bench.settings.swap_device_bytes) as addresses,
        device(bench, addresses, bench.settings.swap_device_bytes, slab_bytes) as own,
    ):
        yield area_of(bench, own)


def area_of(bench: Bench, own: Device) -> Area:
    """A device of ours as a swap area; first every slab is mapped. May be called again, when
    nothing is swapped out there."""
    map_all(bench, own)
    swap.mkswap(own.path, label=_LABEL)

    def settle() -> None:
        _await_idle(bench, own.path.name)
        bench.until(
            lambda: own.status()["stats"]["staging_pages_used"] == 0, "the backup to be written"
        )

    return Area(OURS, own.path, settle, lambda: _page_ins(own))


def map_all(bench: Bench, own: Device) -> None:
    """Slabs get a donor when they are used, so all of it is written until they have one."""
    argv = ["dd", "if=/dev/zero", f"of={own.path}", "bs=1M", "oflag=direct", "status=none"]
    argv += [f"count={own.size_bytes // MIB}"]

    def mapped() -> bool:
        return bool(own.status()["slabs"].get("mapped", 0) * own.slab_bytes >= own.size_bytes)

    end_s = time.monotonic() + START_S
    while not mapped() and time.monotonic() < end_s:
        run_command(argv, timeout_s=START_S)
    bench.until(mapped, "every slab to be mapped", 5.0)


def _page_ins(own: Device) -> dict[str, int]:
    stats = own.status()["stats"]
    return {
        name: stats[name]
        for name in ("pages_in", "pages_in_remote", "pages_in_staging", "pages_in_backup")
    }


@contextlib.contextmanager
def nbdfuse_loop(bench: Bench) -> Iterator[tuple[loop.LoopDevice, Child]]:
    """`nbdfuse` on `nbdkit memory` over TCP, with the same loop device on top; nbdfuse may be
    killed meanwhile.

    Raises:
        SkipError: one of them is not installed.
    """
    require_programs("nbdfuse", "nbdkit")
    mountpoint = bench.work / "nbdfuse"
    mountpoint.mkdir(exist_ok=True)
    size_bytes = bench.settings.swap_device_bytes
    with nbdkit_memory(bench, size_bytes, "nbdkit for nbdfuse") as server:
        argv = ["nbdfuse", str(mountpoint), server.uri]
        with bench.running("nbdfuse", argv) as child:
            disk = mountpoint / "nbd"

            def serves() -> bool:
                if not child.is_running:
                    raise child.failed("ended")
                return disk.exists()

            bench.until(serves, "nbdfuse to serve")
            try:
                with looped(bench, disk) as upper:
                    yield upper, child
            finally:
                if not child.is_running:  # it cannot unmount what it had mounted
                    with bench.scope.interrupts.hold(), contextlib.suppress(InfiniswapError):
                        run_command(["umount", "-l", str(mountpoint)])


@contextlib.contextmanager
def nbdfuse(bench: Bench) -> Iterator[Area]:
    """Swap on that."""
    with nbdfuse_loop(bench) as (upper, _):
        yield _made(bench, NBDFUSE, upper.path)


@contextlib.contextmanager
def floor(bench: Bench) -> Iterator[Area]:
    """Our front end with the bytes in its own process."""
    mountpoint = bench.work / "floor"
    mountpoint.mkdir()
    argv = [bench.program("fuse-floor"), "--mountpoint", str(mountpoint)]
    argv += ["--size-bytes", str(bench.settings.swap_device_bytes)]
    with bench.running("FUSE floor", argv, ends_on_eof=True) as child:
        disk = Path(child.answer(START_S)["disk"])
        with looped(bench, disk) as upper:
            yield _made(bench, FLOOR, upper.path)


@contextlib.contextmanager
def disk(bench: Bench) -> Iterator[Area]:
    """A swap file on this machine's disk."""
    path = image(bench, "disk.img")
    yield _made(bench, DISK, path)


@contextlib.contextmanager
def limited_disk(bench: Bench) -> Iterator[loop.LoopDevice]:
    """The disk as slow as a common cloud volume."""
    root = blkio_root()
    if root is None:
        raise SkipError("the block I/O controller of cgroup version 1 is not there")
    with looped(bench, image(bench, "cloud.img"), is_disk=True) as lower:
        status = lower.path.stat()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        try:
            set_limits_v1(root, number, CLOUD_VOLUME)
            yield lower
        finally:
            set_limits_v1(root, number, IoLimits())


@contextlib.contextmanager
def whole_disk(bench: Bench) -> Iterator[loop.LoopDevice]:
    """This machine's disk, in the same way."""
    with looped(bench, image(bench, "whole.img"), is_disk=True) as lower:
        yield lower


@contextlib.contextmanager
def cloud(bench: Bench) -> Iterator[Area]:
    """Swap on the limited disk. The kernel lets swap-out pass a limit on the swap device itself,
    so the swap area is a loop device over the limited one."""
    with limited_disk(bench) as lower, looped(bench, lower.path, is_disk=True) as upper:
        swap.mkswap(upper.path, label=_LABEL)

        def settle() -> None:
            for name in (upper.path.name, lower.path.name):
                _await_idle(bench, name)

        yield Area(CLOUD, upper.path, settle)


@contextlib.contextmanager
def zram(bench: Bench) -> Iterator[Area]:
    """Compressed memory of this machine."""
    control = SYS / "class/zram-control/hot_add"
    if not control.exists():
        raise SkipError("this kernel has no zram (modprobe zram)")
    try:
        with bench.scope.interrupts.hold():
            number = int(control.read_text())
            (bench.work / f"zram{number}").touch()
        size = SYS / "block" / f"zram{number}" / "disksize"
        size.write_text(str(bench.settings.swap_device_bytes))
        path = Path(f"/dev/zram{number}")
        bench.until(path.exists, f"{path}")
        yield _made(bench, ZRAM, path)
    finally:
        with bench.scope.interrupts.hold():
            remove_zram(bench.work)


ALL: tuple[tuple[str, Any], ...] = (
    (OURS, ours),
    (NBDFUSE, nbdfuse),
    (FLOOR, floor),
    (DISK, disk),
    (CLOUD, cloud),
    (ZRAM, zram),
)
"""In the order of every round."""
