# SPDX-License-Identifier: Apache-2.0
"""A device whose process has died under a `run`.

What was swapped out to it can never be read again, so the programs it belonged to cannot go on.
What is left to do is to say so, to end them, and to take the area away from the kernel, which
would otherwise go on filling it.
"""

from __future__ import annotations

import os
from pathlib import Path

from infiniswap.device import frontends
from infiniswap.device.api import DeviceStatus
from infiniswap.device.process.runs import abandoned_cgroups, end_job
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import InfiniswapError, NotFoundError
from infiniswap.system import swap
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.system.process import pidfd_ended, pidfd_open

_SWAPOFF_S_MAX = 60.0


class DeviceLostError(InfiniswapError):
    """The device's process has died while its swap area was in use."""


class Watch:
    """Tells whether a device lives: its process, or somebody who will take over from that.

    Args:
        paths: of the device.
        status: what it has told.

    Attributes:
        path: of its block device.
    """

    def __init__(self, paths: DevicePaths, status: DeviceStatus) -> None:
        self._paths = paths
        self.path = Path(status.path)
        holder_pid = status.succession.holder_pid if status.succession else None
        # The one that goes last comes last.
        self._pidfds = [_pidfd(pid) for pid in (status.pid, holder_pid) if pid is not None]

    def ended(self, wait_s: float = 0.0) -> bool:
        """Whether no process of it is left, waiting at most `wait_s` seconds for it."""
        # A successor, or a process that has outlived its holder, has the lock.
        return self.known_ended(wait_s) and not rundir.is_running(self._paths)

    def known_ended(self, wait_s: float = 0.0) -> bool:
        """Whether the processes that it had at first have. (Who clears what is left of it has the
        lock meanwhile.)"""
        last = self._pidfds[-1] if self._pidfds else -1
        return last < 0 or pidfd_ended(last, wait_s)

    def lost(self) -> bool:
        """Whether it has died; False also after an orderly stop, which ends the swap area first."""
        return self.ended() and swap.find_area(self.path) is not None

    def close(self) -> None:
        """Idempotent."""
        for pidfd in self._pidfds:
            if pidfd >= 0:
                os.close(pidfd)
        self._pidfds = []


def _pidfd(pid: int) -> int:
    try:
        return pidfd_open(pid)
    except NotFoundError:
        return -1


def clear(paths: DevicePaths, spec: DeviceSpec | None = None) -> None:
    """Takes away what is left of a `run`'s device that has died; nothing when there is nothing.

    Jobs of runs that have died with it are ended first, and then those of other runs that have
    anything swapped out: their memory may be there, too. A page that cannot be read is a fault to
    newer kernels; older ones hand out any bytes for it once the area is removed.

    Args:
        paths: of the device.
        spec: when it may have died before it wrote its record.

    Raises:
        ConflictError: the device runs, or somebody else is clearing it.
        InfiniswapError: something cannot be taken away.
    """
    spec = spec or rundir.read_record(paths.record)
    if spec is None or not spec.ephemeral:
        return
    lock = rundir.take_lock(paths)
    try:
        for cgroup in abandoned_cgroups():
            end_job(cgroup)
        for path in frontends.give_up(paths):
            if swap.find_area(path) is not None:
                _end_swapped_jobs()
                swap.swapoff(path, timeout_s=_SWAPOFF_S_MAX)
        frontends.clear_leftovers(paths)
        contents.delete(paths, spec)
        rundir.clear(paths)
    finally:
        os.close(lock)


def _end_swapped_jobs() -> None:
    for cgroup in find_job_cgroups():
        try:
            swapped_bytes = cgroup.memory().swap_bytes
        except InfiniswapError:
            continue  # it has just been removed
        if swapped_bytes != 0:
            cgroup.kill()
