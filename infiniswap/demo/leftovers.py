# SPDX-License-Identifier: Apache-2.0
"""The names of everything that a demo makes, and how it is removed.

One demo runs at a time. It writes its record before it makes anything, and everything has a name
that follows from the record; so what a killed demo left behind is found and removed by the next,
with the same steps with which a demo ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infiniswap.device.frontends import clear_leftovers
from infiniswap.device.spec import rundir
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    InfiniswapError,
    UnavailableError,
    from_oserror,
)
from infiniswap.system import loop, swap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import try_lock
from infiniswap.system.memory import UNLIMITED_BYTES, memory_hierarchy
from infiniswap.system.throttle import IoLimits, blkio_root, set_limits_v1

RUN_DIR = Path("/run/infiniswap-demo")
WORK_DIR = Path("/var/tmp")
PREFIX = "infiniswap-demo-"
NO_LIMIT_BYTES = UNLIMITED_BYTES
"""As a cgroup's memory limit: none."""

_DEVICE_S_MAX = 120.0
_SWAPOFF_S_MAX = 120.0
_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Record:
    """What a demo makes.

    Attributes:
        demo_id: in the names of its directory and cgroups.
        work_dir: where everything of it lies on disk.
    """

    demo_id: str
    work_dir: str

    @property
    def work(self) -> Path:
        """The work directory."""
        return Path(self.work_dir)

    @property
    def image(self) -> Path:
        """The file that is the cloud volume."""
        return self.work / "volume.img"

    @property
    def secret(self) -> Path:
        """The cluster secret of its donors."""
        return self.work / "secret"

    @property
    def devices(self) -> Path:
        """Run directory of the demo's own device process."""
        return RUN_DIR / "devices"

    def cgroup_name(self, leg: str) -> str:
        """Name of a leg's cgroup."""
        return f"{PREFIX}{self.demo_id}-{leg}"


def new_record(parent: Path) -> Record:
    """A record with a fresh id; nothing is made."""
    demo_id = secrets.token_hex(4)
    return Record(demo_id, str(parent.resolve() / f"{PREFIX}{demo_id}"))


@contextlib.contextmanager
def only_one(run_dir: Path = RUN_DIR) -> Iterator[None]:
    """Holds the lock that every demo takes; the kernel drops it with the process.

    Raises:
        ConflictError: a demo is running.
        NotPermittedError, SystemCallError: the lock file cannot be made.
    """
    path = run_dir / "lock"
    lock = try_lock(path, 0o700)
    if lock is None:
        raise ConflictError(
            "another demo is running", where=str(run_dir), mend="Wait for its end, or end it."
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if not (run_dir / "record.json").exists():
                path.unlink()
                run_dir.rmdir()
        os.close(lock)


def save(record: Record, run_dir: Path = RUN_DIR) -> None:
    """Writes the record atomically.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    path = run_dir / "record.json"
    temporary = run_dir / "record.json.new"
    try:
        temporary.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise from_oserror("cannot write the demo's record", error, where=str(path)) from error


def load(run_dir: Path = RUN_DIR) -> Record | None:
    """The record of a demo that did not end properly, None without one. One that cannot be what
    `save` wrote counts as none: nothing is deleted on its word."""
    try:
        data = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        record = Record(str(data["demo_id"]), str(data["work_dir"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = (
        _ID.fullmatch(record.demo_id)
        and record.work.is_absolute()
        and record.work.name == f"{PREFIX}{record.demo_id}"
    )
    return record if sound else None


def stale(run_dir: Path = RUN_DIR, work_dir: Path = WORK_DIR) -> list[Record]:
    """Records of demos that were killed; the lock must be held. A directory of root's without a
    record (the machine was restarted since) counts too."""
    found: dict[str, Record] = {}
    record = load(run_dir)
    if record is not None:
        found[record.work_dir] = record
    with contextlib.suppress(OSError):
        for path in sorted(work_dir.resolve().glob(PREFIX + "*")):
            demo_id = path.name.removeprefix(PREFIX)
            ours = not path.is_symlink() and path.is_dir() and path.stat().st_uid == os.geteuid()
            if ours and _ID.fullmatch(demo_id):
                found.setdefault(str(path), Record(demo_id, str(path)))
    return list(found.values())


# ------------------------------------------------------------------------------ taking away


def sweep(record: Record, run_dir: Path = RUN_DIR) -> list[str]:
    """Removes everything that the record names, users before what they use; a failure does not stop
    it. Returns the failures, one text each: the record itself goes only when there is none."""
    steps: tuple[tuple[str, Callable[[Record], None]], ...] = (
        ("the device", _await_devices),
        ("the jobs' cgroups", _remove_cgroups),
        ("the volume", release_volume),
        ("the work directory", _remove_work),
    )
    failures: list[str] = []
    for what, step in steps:
        try:
            step(record)
        except (InfiniswapError, OSError) as error:
            failures.append(f"{what}: {error}")
    if not failures:
        with contextlib.suppress(OSError):
            (run_dir / "record.json").unlink(missing_ok=True)
            (run_dir / "devices").rmdir()
    return failures


def _remove_cgroups(record: Record) -> None:
    try:
        hierarchy = memory_hierarchy()
    except UnavailableError:
        return
    for path in sorted(hierarchy.mount_point.glob(record.cgroup_name("*"))):
        cgroup = MemoryCgroup(path, hierarchy.version)
        cgroup.kill()
        cgroup.remove()


def _await_devices(record: Record) -> None:
    """A device whose `run` is gone takes itself away; that takes as long as its swapoff."""
    end_s = time.monotonic() + _DEVICE_S_MAX
    while names := rundir.running_names(record.devices):
        if time.monotonic() >= end_s:
            raise DeadlineError(
                f"the device {names[0]} did not end within {_DEVICE_S_MAX:g} s",
                where=str(record.devices / names[0]),
                mend="See `log` there.",
            )
        time.sleep(0.1)
    directories = sorted(record.devices.iterdir()) if record.devices.is_dir() else []
    for directory in directories:  # of a device process that was killed
        paths = rundir.DevicePaths(directory.name, directory, record.work)
        for device in loop.find_by_backing(paths.mount / "disk"):
            swap.swapoff(device.path, timeout_s=_SWAPOFF_S_MAX)
        clear_leftovers(paths)
        rundir.clear(paths)


def release_swap(volume: loop.LoopDevice) -> None:
    """Swap area and loop device on top of the volume's.

    Raises:
        InfiniswapError: something is still in use.
    """
    for upper in loop.find_by_backing(volume.path):
        swap.swapoff(upper.path, timeout_s=_SWAPOFF_S_MAX)
        loop.detach(upper)


def release_volume(record: Record) -> None:
    """The volume: swap area, loop devices, limits.

    Raises:
        InfiniswapError: something is still in use.
    """
    for volume in loop.find_by_backing(record.image):
        release_swap(volume)
        unlimit(volume)
        loop.detach(volume)


def unlimit(volume: loop.LoopDevice) -> None:
    """No limit stays behind: the kernel would keep them for the next user of the loop device."""
    root = blkio_root()
    if root is not None:
        set_limits_v1(root, device_number(volume), IoLimits())


def device_number(device: loop.LoopDevice) -> str:
    """MAJOR:MINOR."""
    status = device.path.stat()
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _remove_work(record: Record) -> None:
    if record.work.is_dir() and not record.work.is_symlink():
        shutil.rmtree(record.work)
