# SPDX-License-Identifier: Apache-2.0
"""Connects the engine to the kernel and takes it off again: mount, loop device, swap.

Attaching undoes itself when a step fails. Detaching goes strictly backwards - swapoff, verify,
loop device, mount - and stops where something is still in use: the process then goes on serving.
All of it blocks; none of it runs on the event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from infiniswap.device.rundir import DevicePaths
from infiniswap.device.spec import DeviceSpec
from infiniswap.engine.protocol import Engine, Frontend
from infiniswap.errors import (
    ConflictError,
    InfiniswapError,
    MemoryLimitError,
    NotPermittedError,
    SystemCallError,
    UnavailableError,
    UsageError,
)
from infiniswap.system import loop, mounts, swap
from infiniswap.system.files import try_read_text

log = logging.getLogger(__name__)

LINK_DIR = Path("/dev/infiniswap")
_SWAPOFF_S_MAX = 3600.0
_BRIEF_USE_S = 2.0
_PROCESSES_NAMED_MAX = 5
_LOOP_MAJOR = 7
BACKING_UNMOUNTED = "/disk"
"""What the kernel names the backing file once its mount is gone."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A front end and why it was taken."""

    frontend: str
    why: str


def choose_frontend(asked: str, swap_wanted: bool) -> Choice:
    """The front end to use on this host.

    Raises:
        UnavailableError: none works, or the one asked for does not.
        UsageError: nbd-socket with swap.
        NotPermittedError: not root.
    """
    if asked in ("ublk", "nbd"):
        raise UnavailableError(
            f"this release has no {asked} front end",
            mend="Use --frontend fuse (or auto).",
        )
    if asked == "nbd-socket":
        if swap_wanted:
            raise UsageError(
                "the nbd-socket front end is no block device, so nothing can swap on it",
                mend="Leave --swap out, or use --frontend fuse.",
            )
        return Choice("nbd-socket", "asked for")
    if os.geteuid() != 0:
        raise NotPermittedError(
            "a block device needs root",
            mend="Run it with sudo, or use --frontend nbd-socket for a device without the kernel.",
        )
    for needed, mend in (
        ("/dev/fuse", "Load it: modprobe fuse."),
        ("/dev/loop-control", "Load it: modprobe loop."),
    ):
        if not Path(needed).exists():
            raise UnavailableError(f"this host has no {needed}", mend=mend)
    why = "asked for" if asked == "fuse" else "the only kernel front end of this release"
    return Choice("fuse", why)


@dataclass(slots=True)
class Attachment:
    """What of a device is attached. Each field is set once that step stands.

    Attributes:
        path: block device or socket that users see.
        priority: of the swap area while it is active.
    """

    spec: DeviceSpec
    paths: DevicePaths
    choice: Choice
    frontend: Frontend | None = None
    mounted: bool = False
    loop: loop.LoopDevice | None = None
    link: Path | None = None
    swap_active: bool = False
    priority: int | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The block device, or the socket of nbd-socket."""
        if self.loop is not None:
            return str(self.loop.path)
        return str(self.paths.nbd_socket)

    def attach_device(self, engine: Engine) -> None:
        """Front end, loop device and link. On failure nothing stays attached.

        Raises:
            InfiniswapError: the step that failed.
        """
        try:
            clear_leftovers(self.paths)
            if self.choice.frontend == "nbd-socket":
                self.frontend = engine.frontend_nbd_socket(str(self.paths.nbd_socket))
                return
            self.paths.mount.mkdir(mode=0o700, exist_ok=True)
            self.frontend = engine.frontend_fuse(str(self.paths.mount))
            self.mounted = True
            self.loop = loop.attach(self.paths.mount / "disk")
            refused = loop.tune(self.loop)
            if refused:
                log.info("loop device: the kernel refused to set %s", ", ".join(refused))
            self._make_link()
        except BaseException:
            self.detach_device()
            raise

    def _make_link(self) -> None:
        assert self.loop is not None
        link = LINK_DIR / self.spec.name
        try:
            LINK_DIR.mkdir(mode=0o755, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(self.loop.path)
        except OSError as error:
            self.warnings.append(f"no link {link}: {error.strerror}")
            return
        self.link = link

    def attach_swap(self) -> None:
        """mkswap and swapon, above every active area unless a priority was given.

        Raises:
            ConflictError, SystemCallError: the kernel's refusal. Nothing is active then.
        """
        assert self.loop is not None
        path = self.loop.path
        swap.mkswap(path, label=f"{swap.SWAP_LABEL_PREFIX}{self.spec.name}"[: swap.LABEL_CHARS_MAX])
        priority = self.spec.priority
        if priority is None:
            priority = swap.priority_above(swap.active_areas())
        swap.swapon(path, priority=priority, discard=True)
        self.swap_active = True
        self.priority = priority

    def swap_used_bytes(self) -> int:
        """What is swapped out to the device now."""
        return swap.used_bytes(self.loop.path) if self.swap_active and self.loop else 0

    def detach_swap(self) -> None:
        """swapoff in a child process, while this one serves the pages that come back.

        Raises:
            MemoryLimitError: they would not fit into memory; nothing was done.
            InfiniswapError: the kernel's refusal; the area is still active.
        """
        if not self.swap_active or self.loop is None:
            return
        path = self.loop.path
        if swap.find_area(path) is not None:  # an administrator may have been faster
            fit = swap.swapoff_fits(path)
            if not fit.fits:
                raise MemoryLimitError(
                    f"what is swapped out does not fit back into memory: {fit.reason}",
                    where=f"device {self.spec.name}",
                    mend="End the programs that use it, or raise the limit, and stop it again.",
                )
            swap.swapoff(path, timeout_s=_SWAPOFF_S_MAX)
        if swap.find_area(path) is not None:
            raise SystemCallError("the area is still active after swapoff", where=str(path))
        self.swap_active = False
        self.priority = None

    def check_unused(self) -> None:
        """Refuses to detach a device that somebody has mounted, has open, or uses as swap.

        The kernel would not refuse: it detaches a loop device later, when the last user is gone.

        Raises:
            ConflictError: who uses it.
        """
        if self.loop is None:
            return
        where = f"device {self.spec.name}"
        status = self.loop.path.stat()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        users = [str(mount.mount_point) for mount in mounts.mounts_of_device(number)]
        if users:
            raise ConflictError(
                f"it is mounted at {', '.join(users)}",
                where=where,
                mend=f"Unmount it: umount {users[0]}.",
            )
        if swap.find_area(self.loop.path) is not None:
            raise ConflictError("it is in use as swap space", where=where)
        end_s = time.monotonic() + _BRIEF_USE_S
        while opened := processes_with_open(status.st_rdev):
            if time.monotonic() >= end_s:
                raise ConflictError(
                    f"it is open in {', '.join(opened)}", where=where, mend="End that first."
                )
            time.sleep(0.05)  # something that only had a look, as udev does
        try:
            os.close(os.open(self.loop.path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            raise ConflictError(
                f"the kernel uses it ({error.strerror}): mounted in a container, or part of LVM, "
                "RAID or encryption",
                where=where,
                mend=f"See what it is with lsblk {self.loop.path}.",
            ) from error

    def detach_device(self) -> None:
        """Loop device, then front end and mount.

        Raises:
            ConflictError: the loop device is in use; everything below it stays.
        """
        if self.loop is not None:
            loop.detach(_as_named_now(self.loop))
            self.loop = None
        if self.link is not None:
            _remove_link(self.spec.name)
            self.link = None
        if self.frontend is not None:
            self.frontend.close()
            self.frontend = None
            self.paths.nbd_socket.unlink(missing_ok=True)
        if self.mounted:
            self.mounted = False
            with contextlib.suppress(OSError):
                self.paths.mount.rmdir()


def processes_with_open(device: int) -> list[str]:
    """Processes, this one left out, that have a block device open: `name (pid)`, a few of them.

    Args:
        device: its number, as st_rdev has it.
    """
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            opened = any(_is_device(entry, device) for entry in (process / "fd").iterdir())
        except OSError:
            continue  # it has ended, or is not ours to look at
        if opened:
            name = (try_read_text(process / "comm") or "?").strip()
            found.append(f"{name} ({process.name})")
            if len(found) >= _PROCESSES_NAMED_MAX:
                break
    return found


def _is_device(path: Path, device: int) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISBLK(status.st_mode) and status.st_rdev == device


def _as_named_now(device: loop.LoopDevice) -> loop.LoopDevice:
    """When somebody has unmounted the front end lazily, the kernel only knows the path in it."""
    now = loop.loop_device(device.number)
    return now if now is not None and now.backing == BACKING_UNMOUNTED else device


def _remove_link(name: str) -> None:
    with contextlib.suppress(OSError):
        (LINK_DIR / name).unlink(missing_ok=True)
        LINK_DIR.rmdir()


def clear_leftovers(paths: DevicePaths) -> None:
    """Takes away what a killed process of this device left attached.

    Raises:
        ConflictError: its loop device is still in use (as swap space whose contents are gone, or
            mounted): only the user can end that.
    """
    paths.nbd_socket.unlink(missing_ok=True)
    for device in _leftover_loops(paths):
        if swap.find_area(device.path) is not None:
            raise ConflictError(
                f"{device.path} is swap space of an earlier process of this device that died",
                where=f"device {paths.name}",
                mend="End the programs whose memory is there, then `swapoff` it, or restart the "
                "host.",
            )
        _check_unmounted(device, paths.name)
        loop.detach(device)
        _remove_link(paths.name)
    mount_point = os.path.join(os.path.realpath(paths.run), paths.mount.name)
    for mount in mounts.infiniswap_mounts():
        if mount.mount_point != mount_point:
            continue
        log.warning("%s: mount of an earlier process removed", paths.mount)
        try:
            mounts.unmount(paths.mount, lazy=True)
        except InfiniswapError as error:
            raise ConflictError(
                f"a mount of an earlier process cannot be removed: {error.what}",
                where=str(paths.mount),
            ) from error


def _leftover_loops(paths: DevicePaths) -> list[loop.LoopDevice]:
    found = list(loop.find_by_backing(paths.mount / "disk"))
    linked = os.path.realpath(LINK_DIR / paths.name)
    found += [
        device
        for device in loop.attached()
        if str(device.path) == linked and device.backing == BACKING_UNMOUNTED
    ]
    return found


def _check_unmounted(device: loop.LoopDevice, name: str) -> None:
    for mount in mounts.mounts_of_device(f"{_LOOP_MAJOR}:{device.number}"):
        raise ConflictError(
            f"{device.path}, of an earlier process of this device that died, is mounted at "
            f"{mount.mount_point}",
            where=f"device {name}",
            mend=f"Unmount it: umount {mount.mount_point}.",
        )
