# SPDX-License-Identifier: Apache-2.0
"""fuse: a file system of ours with one file, `disk`, and a loop device on that."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from infiniswap.device.frontends import in_use
from infiniswap.device.frontends.base import (
    Condition,
    FrontEnd,
    Handover,
    KernelDevice,
    Leftover,
    Owner,
    Places,
    is_served,
    owner_of,
)
from infiniswap.device.spec.rundir import LINK_DIR, DevicePaths
from infiniswap.engine.protocol import Engine, Frontend, FrontendConfig
from infiniswap.errors import (
    ConflictError,
    EngineError,
    InfiniswapError,
    NotFoundError,
    UnavailableError,
)
from infiniswap.system import loop, mounts

log = logging.getLogger(__name__)

BACKING_UNMOUNTED = "/disk"
"""The kernel's name of the backing file once its mount is gone."""

_CONNECTION = "fuse"
_MOUNTED = "/mnt/disk"


def check() -> None:
    """Whether this host has what it takes.

    Raises:
        UnavailableError: what is missing, and how to mend it.
    """
    for needed, mend in (
        ("/dev/fuse", "Load it: modprobe fuse."),
        ("/dev/loop-control", "Load it: modprobe loop."),
    ):
        if not Path(needed).exists():
            raise UnavailableError(f"this host has no {needed}", mend=mend)


class FuseLoop(KernelDevice):
    """A KernelDevice. Each field is set once that step stands."""

    def __init__(self, paths: DevicePaths) -> None:
        self._paths = paths
        self._frontend: Frontend | None = None
        self._mounted = False
        self._loop: loop.LoopDevice | None = None

    @property
    def block_device(self) -> Path | None:
        """The loop device."""
        return None if self._loop is None else self._loop.path

    @property
    def path(self) -> str:
        """The loop device; the mount until there is one."""
        return str(self._paths.mount if self._loop is None else self._loop.path)

    def attach(self, engine: Engine) -> None:
        """Mount, then loop device."""
        self._paths.mount.mkdir(mode=0o700, exist_ok=True)
        self._frontend = engine.frontend("fuse", FrontendConfig(path=str(self._paths.mount)))
        self._mounted = True
        self._attach_loop()

    def _attach_loop(self) -> None:
        self._loop = loop.attach(self._paths.mount / "disk")
        refused = loop.tune(self._loop)
        if refused:
            log.info("loop device: the kernel refused to set %s", ", ".join(refused))

    def is_ours(self) -> bool:
        """By the kernel's count of attachments; before Linux 5.15 by the backing file."""
        if self._loop is None:
            return False
        now = loop.loop_device(self._loop.number)
        return now is not None and now.is_attachment(self._as_named(now))

    def _as_named(self, now: loop.LoopDevice) -> loop.LoopDevice:
        """The loop device as it was attached, under the name that the kernel has for it now: once
        somebody has unmounted the front end lazily, that is only the path in it."""
        assert self._loop is not None
        if now.backing != BACKING_UNMOUNTED:
            return self._loop
        return dataclasses.replace(self._loop, backing=BACKING_UNMOUNTED)

    def attach_again(self) -> None:
        """Another loop device on the same file.

        Raises:
            InfiniswapError: the file, its mount, or a free loop device is missing.
        """
        self._loop = None
        self._attach_loop()

    def handover(self) -> Handover:
        """The connection to the kernel: with its last copy the mount dies.

        Raises:
            UnavailableError: this kernel or libfuse cannot hand it on.
        """
        assert self._frontend is not None
        try:
            connection, init = self._frontend.handover()
        except EngineError as error:
            raise UnavailableError(error.what) from error
        return Handover({_CONNECTION: connection}, _note(self._loop, init))

    def prepare(self, engine: Engine, note: bytes) -> None:
        """Buffers and libfuse's session."""
        self._loop, init = _read_note(note)
        self._frontend = engine.frontend_prepare(
            "fuse", FrontendConfig(path=str(self._paths.mount), note=init)
        )

    def take_over(self, descriptors: Mapping[str, int]) -> None:
        """The same connection; mount, loop device and swap stay as they are.

        Raises:
            NotFoundError: the connection or the loop device is gone.
        """
        assert self._frontend is not None
        connection = descriptors.get(_CONNECTION)
        now = self._find_loop()
        if connection is None or now is None:
            raise NotFoundError(
                "its loop device, or the FUSE connection below that, is gone",
                where=f"device {self._paths.name}",
            )
        self._loop = now
        self._mounted = True
        try:
            self._frontend.serve(connection)
        finally:
            os.close(connection)

    def _find_loop(self) -> loop.LoopDevice | None:
        """Under its number or another one: the predecessor may have had to attach it again.

        Does not look at the file itself, as that would wait for this very process.
        """
        mount = os.path.join(os.path.realpath(self._paths.run), self._paths.mount.name)
        backing = f"{mount}/disk"
        first = None if self._loop is None else loop.loop_device(self._loop.number)
        if first is not None and first.backing in (backing, BACKING_UNMOUNTED):
            return first
        return next((found for found in loop.attached() if found.backing == backing), None)

    def detach(self) -> None:
        """Loop device, then mount.

        Raises:
            ConflictError: the loop device is in use.
        """
        if self._loop is not None:
            now = loop.loop_device(self._loop.number)
            loop.detach(self._loop if now is None else self._as_named(now))
            self._loop = None
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None
        if self._mounted:
            self._mounted = False
            with contextlib.suppress(OSError):
                self._paths.mount.rmdir()


def _note(device: loop.LoopDevice | None, init: bytes) -> bytes:
    """For the successor: the loop device's number, and the kernel's first message."""
    assert device is not None
    return f"{device.number}:{device.backing}\n".encode() + init


def _read_note(note: bytes) -> tuple[loop.LoopDevice, bytes]:
    head, _, init = note.partition(b"\n")
    number, _, backing = head.decode().partition(":")
    device = loop.LoopDevice(int(number), backing, deleted=False, direct_io=True, autoclear=False)
    return device, init


def clear(paths: DevicePaths) -> None:
    """As FrontEnd says: loop devices, then the mount."""
    for device in _leftover_loops(paths):
        in_use.check_left_unused(
            device.path,
            paths.name,
            "End the programs whose memory is there, then `swapoff` it, or restart the host.",
        )
        loop.detach(device)
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


def give_up(paths: DevicePaths) -> tuple[Path, ...]:
    """As FrontEnd says: without the process the requests fail."""
    return tuple(device.path for device in loop.find_by_backing(paths.mount / "disk"))


def _leftover_loops(paths: DevicePaths) -> list[loop.LoopDevice]:
    found = list(loop.find_by_backing(paths.mount / "disk"))
    linked = os.path.realpath(LINK_DIR / paths.name)
    found += [
        device
        for device in loop.attached()
        if str(device.path) == linked and device.backing == BACKING_UNMOUNTED
    ]
    return found


def examine(places: Places) -> Iterator[Condition]:
    """As FrontEnd says."""
    for name, node in (("fuse", "fuse"), ("loop", "loop-control")):
        mend = f"modprobe {name} (in a container: pass the device in, --device /dev/{node})"
        if (places.dev / node).exists():
            yield Condition(name, f"/dev/{node} is there")
        else:
            yield Condition(name, f"/dev/{node} is missing", mend)


def owners(run_dir: Path, places: Places) -> Iterator[tuple[Path, Owner]]:
    """As FrontEnd says."""
    for device in loop.attached(sys=places.sys):
        if (run := _run_of(device, run_dir, places.links)) is not None:
            yield device.path, owner_of(run, run_dir, f"losetup -d {device.path}")


def _run_of(device: loop.LoopDevice, run_dir: Path, links: Path) -> Path | None:
    """The run directory of the device process that made it, None when it is none of ours."""
    if device.backing.endswith(_MOUNTED) and device.backing != _MOUNTED:
        run = Path(device.backing.removesuffix(_MOUNTED))
        # Both are False where this user may not look: then it is another user's.
        if os.path.exists(run / "lock") or os.path.exists(run / "device.json"):
            return run
    if device.backing == BACKING_UNMOUNTED:
        with contextlib.suppress(OSError):
            for link in sorted(links.iterdir()):
                if os.path.realpath(link) == str(device.path):
                    return run_dir / link.name
    return None


def leftovers(run_dir: Path, died: Collection[str], places: Places) -> Iterator[Leftover]:
    """As FrontEnd says: mounts, then loop devices."""
    known = {os.path.realpath(run_dir / name) for name in died}
    for mount in mounts.infiniswap_mounts(proc=places.proc):
        run = Path(mount.mount_point).parent
        if not is_served(run) and os.path.realpath(run) not in known:
            yield Leftover(
                f"{mount.mount_point}: a mount that no device process serves",
                f"umount -l {mount.mount_point}",
            )
    for path, owner in owners(run_dir, places):
        if not owner.alive and owner.name not in died:
            yield Leftover(
                f"{path}: a loop device of {owner.name}, which no process serves",
                f"swapoff {path}; losetup -d {path}",
            )


FRONT_END: Final = FrontEnd(
    name="fuse",
    check=check,
    make=FuseLoop,
    clear=clear,
    give_up=give_up,
    examine=examine,
    owners=owners,
    leftovers=leftovers,
    is_needed=True,
    packages="libfuse3-dev",
    warning="the fuse front end keeps its promises for programs under a memory limit; under "
    "pressure on the whole host it may have to wait for memory",
)
