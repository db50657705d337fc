# SPDX-License-Identifier: Apache-2.0
"""What a run makes on this machine, and how it is removed, however the run ends.

A run has a mark. Its directory carries it in its name and every process in its environment; loop
devices, mounts and swap areas lie on files of the directory. A file system that was unmounted under
its loop device no longer has its path, so the directory also keeps a note of each loop device. So
the next run finds what a killed one has left behind, and takes it away with the steps with which
each run ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

from infiniswap.errors import InfiniswapError
from infiniswap.system import loop, swap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC, SYS, try_read_text
from infiniswap.system.interrupts import Interrupts
from infiniswap.system.memory import memory_hierarchy
from infiniswap.system.mounts import mounts
from infiniswap.system.programs import run_command
from infiniswap.system.throttle import IoLimits, blkio_root, set_limits_v1
from isw_bench import zswap
from isw_bench.children import MARK

PREFIX = "isw-bench-"
WORK_DIR = Path("/var/tmp")
_TERM_S = 15.0
_SWAPOFF_S = 120.0
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_INFO_BYTES = 232  # struct loop_info64 of linux/loop.h


class Scope:
    """The life of one run. Enter it before anything is made.

    Attributes:
        mark: of this run.
        work: its directory, on a disk.
        interrupts: to hold signals with.
    """

    def __init__(self, parent: Path = WORK_DIR) -> None:
        self.mark = secrets.token_hex(4)
        self.work = parent / f"{PREFIX}{self.mark}"
        self.interrupts = Interrupts()
        self._lock = -1

    def __enter__(self) -> Scope:
        self.interrupts.__enter__()
        try:
            for stale in stale_directories(self.work.parent):
                sweep(stale)
            with self.interrupts.hold():
                self.work.mkdir(mode=0o700)
                self._lock = _lock(self.work)
        except BaseException:
            self.interrupts.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        failures: list[str] = []
        try:
            with self.interrupts.hold():  # a second Ctrl-C must not leave half of it behind
                failures = sweep(self.work)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
            self.interrupts.__exit__(None, None, None)
            for failure in failures:
                print(f"bench: left behind: {failure}", flush=True)


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def stale_directories(parent: Path) -> list[Path]:
    """Directories of runs whose process is gone: nobody holds their lock."""
    found = []
    for path in sorted(parent.glob(PREFIX + "*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            os.close(_lock(path))
        except OSError:
            continue
        found.append(path)
    return found


# ----------------------------------------------------------------------- taking away


def sweep(work: Path) -> list[str]:
    """Removes everything that a run has made, users before what they use; a failure does not stop
    it. Returns the failures, one text each."""
    mark = work.name.removeprefix(PREFIX)
    steps: list[tuple[str, Callable[[], None]]] = [
        ("cgroups", lambda: _remove_cgroups(mark)),
        ("settings of zswap", lambda: zswap.restore(work)),
        ("swap areas", lambda: _swapoff(work)),
        ("loop devices", lambda: _detach(work)),
        ("zram devices", lambda: remove_zram(work)),
        ("processes", lambda: _end_processes(mark)),
        # Again: what a process of the run still held, and made on its way out.
        ("loop devices", lambda: _detach(work)),
        ("mounts", lambda: _unmount(work)),
    ]
    failures: dict[str, str] = {}
    for what, step in steps:
        failures.pop(what, None)
        try:
            step()
        except (InfiniswapError, OSError) as error:
            failures[what] = f"{what} of {work}: {error}"
    if not failures:
        shutil.rmtree(work, ignore_errors=True)
    return list(failures.values())


def _remove_cgroups(mark: str) -> None:
    hierarchy = memory_hierarchy()
    for path in hierarchy.mount_point.glob(f"{PREFIX}{mark}*"):
        cgroup = MemoryCgroup(path, hierarchy.version)
        cgroup.kill()
        cgroup.remove()


def _identity(device: loop.LoopDevice) -> str:
    """Numbers of the device and inode of the file that the loop device is attached to.

    Raises:
        OSError: to nothing, or its file system has lost its server.
    """
    descriptor = os.open(device.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        info = bytearray(_LOOP_INFO_BYTES)
        fcntl.ioctl(descriptor, _LOOP_GET_STATUS64, info)
    finally:
        os.close(descriptor)
    return "{} {}".format(*struct.unpack_from("=QQ", info))


def note_loop(work: Path, device: loop.LoopDevice) -> None:
    """Remembers that the device is the run's. Signals are held."""
    note = f"{_identity(device)}\n{Path(device.backing).name}"
    (work / device.path.name).write_text(note)


def _is_noted(work: Path, device: loop.LoopDevice) -> bool:
    identity, _, name = (try_read_text(work / device.path.name) or "").partition("\n")
    if not identity or name != Path(device.backing).name:
        return False
    try:
        return identity == _identity(device)
    except OSError as error:
        return error.errno == errno.ENOTCONN  # its file can no longer be told


def _loops(work: Path) -> list[loop.LoopDevice]:
    """Loop devices on files below the directory and on each other, the uppermost first."""
    found: list[loop.LoopDevice] = []
    below = {str(work)}
    devices = list(loop.attached())
    while True:
        new = [
            device
            for device in devices
            if device not in found
            and (
                any(device.backing == base or _is_under(device.backing, base) for base in below)
                or _is_noted(work, device)
            )
        ]
        if not new:
            break
        found += new
        below |= {str(device.path) for device in new}
    return sorted(found, key=lambda device: _height(device, found), reverse=True)


def _height(device: loop.LoopDevice, devices: list[loop.LoopDevice]) -> int:
    """How many of the devices it stands on."""
    lower = [other for other in devices if str(other.path) == device.backing]
    return 1 + _height(lower[0], devices) if lower else 0


def _is_under(path: str, base: str) -> bool:
    return path.startswith(base.rstrip("/") + "/")


def zram_numbers(work: Path) -> list[int]:
    """zram devices that the run has made: it keeps an empty file named after each."""
    return [int(path.name.removeprefix("zram")) for path in work.glob("zram[0-9]*")]


def _swapoff(work: Path) -> None:
    own = {str(device.path) for device in _loops(work)}
    own |= {f"/dev/zram{number}" for number in zram_numbers(work)}
    for area in swap.active_areas():
        if area.path in own or _is_under(area.path, str(work)):
            swap.swapoff(Path(area.path), timeout_s=_SWAPOFF_S)


def _detach(work: Path) -> None:
    root = blkio_root()
    for device in _loops(work):
        if root is not None:  # the kernel keeps limits for the next user of the number
            status = device.path.stat()
            number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            set_limits_v1(root, number, IoLimits())
        loop.detach(device)


def remove_zram(work: Path) -> None:
    """Removes the run's zram devices, which nothing may be using."""
    for number in zram_numbers(work):
        if (SYS / "block" / f"zram{number}").exists():
            (SYS / "class/zram-control/hot_remove").write_text(str(number))
        (work / f"zram{number}").unlink(missing_ok=True)


def marked_processes(mark: str) -> list[int]:
    """Processes that carry the mark, but this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _end_processes(mark: str) -> None:
    for number, wait_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
        pids = marked_processes(mark)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end_s = time.monotonic() + wait_s
        while marked_processes(mark):
            if time.monotonic() >= end_s:
                break
            time.sleep(0.05)
        else:
            return
    raise OSError(f"processes that cannot be killed: {marked_processes(mark)}")


def _unmount(work: Path) -> None:
    points = [mount.mount_point for mount in mounts() if _is_under(mount.mount_point, str(work))]
    for point in reversed(points):
        run_command(["umount", "--lazy", point])
