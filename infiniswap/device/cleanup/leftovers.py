# SPDX-License-Identifier: Apache-2.0
"""What killed processes of ours have left in the kernel, and the command that takes it away.

Only looks: `infiniswap device remove` and `run` clean up what they know of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.device.frontends.fuse import BACKING_UNMOUNTED
from infiniswap.device.frontends.nbd import run_of
from infiniswap.device.frontends.ublk import identity_of, is_ours
from infiniswap.device.process.runs import abandoned_cgroups
from infiniswap.device.spec.rundir import LINK_DIR, DevicePaths, died_names, is_running
from infiniswap.engine.native_ublk import ublk_shape
from infiniswap.errors import NotPermittedError, UnavailableError
from infiniswap.system import loop, mounts, nbd, ublk
from infiniswap.system.files import PROC, SYS
from infiniswap.system.swap import SwapArea

_MOUNTED = "/mnt/disk"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that no process serves; `mend` is the command that takes it away."""

    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Owner:
    """The device behind a block device; `mend` takes away what is left of a dead one."""

    name: str
    alive: bool
    mend: str


def _runs(run: Path) -> bool:
    try:
        return is_running(DevicePaths(run.name, run, run))
    except NotPermittedError:
        return True  # somebody's, at any rate


def owner_of(device: loop.LoopDevice, run_dir: Path, link_dir: Path = LINK_DIR) -> Owner | None:
    """Whose loop device it is, None when it is none of ours."""
    if device.backing.endswith(_MOUNTED) and device.backing != _MOUNTED:
        run = Path(device.backing.removesuffix(_MOUNTED))
        # Both are False where this user may not look: then it is another user's.
        if os.path.exists(run / "lock") or os.path.exists(run / "device.json"):
            return Owner(run.name, _runs(run), _mend(run, run_dir, device))
    if device.backing != BACKING_UNMOUNTED:
        return None
    with contextlib.suppress(OSError):
        for link in sorted(link_dir.iterdir()):
            if os.path.realpath(link) == str(device.path):
                run = run_dir / link.name
                return Owner(link.name, _runs(run), _mend(run, run_dir, device))
    return None


def _mend(run: Path, run_dir: Path, device: loop.LoopDevice) -> str:
    if os.path.realpath(run.parent) == os.path.realpath(run_dir):
        return f"infiniswap device remove {run.name}"
    return f"losetup -d {device.path}"


def owner_of_nbd(device: nbd.NbdDevice, run_dir: Path) -> Owner | None:
    """Whose nbd device it is, None when it is none of ours."""
    run = run_of(device)
    if run is None:
        return None
    ours = os.path.realpath(run.parent) == os.path.realpath(run_dir)
    mend = f"infiniswap device remove {run.name}" if ours else f"nbd-client -d {device.path}"
    return Owner(run.name, _runs(run), mend)


def devices_of_areas(
    areas: Iterable[SwapArea], run_dir: Path, *, sys: Path = SYS, link_dir: Path = LINK_DIR
) -> dict[SwapArea, Owner]:
    """Which of the swap areas are devices of ours."""
    owners = {
        str(device.path): owner_of(device, run_dir, link_dir) for device in loop.attached(sys=sys)
    }
    owners |= {str(device.path): owner_of_nbd(device, run_dir) for device in nbd.devices(sys=sys)}
    found = {area: owners.get(area.path) for area in areas}
    return {area: owner for area, owner in found.items() if owner is not None}


def find(
    run_dir: Path, *, proc: Path = PROC, sys: Path = SYS, link_dir: Path = LINK_DIR
) -> Iterator[Leftover]:
    """Everything that is left behind."""
    died = died_names(run_dir)
    for name in died:
        yield Leftover(
            f"the process of device {name} has died",
            f"infiniswap device start {name} (keeps the contents where that is possible), or "
            f"infiniswap device remove {name}",
        )
    known = {os.path.realpath(run_dir / name) for name in died}
    for mount in mounts.infiniswap_mounts(proc=proc):
        run = Path(mount.mount_point).parent
        if not _runs(run) and os.path.realpath(run) not in known:
            yield Leftover(
                f"{mount.mount_point}: a mount that no device process serves",
                f"umount -l {mount.mount_point}",
            )
    for device in loop.attached(sys=sys):
        owner = owner_of(device, run_dir, link_dir)
        if owner is not None and not owner.alive and owner.name not in died:
            yield Leftover(
                f"{device.path}: a loop device of {owner.name}, which no process serves",
                f"swapoff {device.path}; losetup -d {device.path}",
            )
    for left in nbd.devices(sys=sys):
        owner = owner_of_nbd(left, run_dir)
        if owner is not None and not owner.alive and owner.name not in died:
            yield Leftover(
                f"{left.path}: an nbd device of {owner.name}, which no process serves",
                # In this order: what waits for the process fails, so that swapoff can end.
                f"nbd-client -d {left.path}; swapoff {left.path}",
            )
    yield from _ublk_devices(run_dir, died, sys)
    yield from _links(link_dir)
    yield from _cgroups()


def _ublk_devices(run_dir: Path, died: Iterable[str], sys: Path) -> Iterator[Leftover]:
    """Those of devices that died are named above, with their device."""
    known = {identity_of(DevicePaths(name, run_dir / name, run_dir)) for name in died}
    for number in ublk.numbers(sys=sys):
        try:
            shape = ublk_shape(number)
        except (UnavailableError, NotPermittedError):
            return
        if shape is None or shape.live or not is_ours(shape.identity) or shape.identity in known:
            continue
        yield Leftover(
            f"{ublk.block_path(number)}: a ublk device of infiniswap that no process serves (the "
            f"last was {shape.server_pid})",
            "start the device again with the run directory that it had (device.run_dir), or "
            "restart the host",
        )


def _links(link_dir: Path) -> Iterator[Leftover]:
    with contextlib.suppress(OSError):
        for link in sorted(link_dir.iterdir()):
            if link.is_symlink() and not link.exists():
                yield Leftover(f"{link}: a link to a device that is gone", f"rm {link}")


def _cgroups() -> Iterator[Leftover]:
    try:
        abandoned = abandoned_cgroups()
    except UnavailableError:
        return
    for cgroup in abandoned:
        pids = cgroup.pids()
        if pids:
            listed = " ".join(str(pid) for pid in pids[:20])
            yield Leftover(
                f"{cgroup.path}: {len(pids)} processes of a job whose `infiniswap run` has ended",
                f"kill {listed}; rmdir {cgroup.path}",
            )
        else:
            yield Leftover(
                f"{cgroup.path}: the cgroup of a job that has ended", f"rmdir {cgroup.path}"
            )
