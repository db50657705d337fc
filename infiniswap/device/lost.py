# SPDX-License-Identifier: Apache-2.0
"""A device whose process has died under a `run`.

What was swapped out to it can never be read again, so the programs it belonged to cannot go on.
What is left to do is to say so, to end them, and to take the area away from the kernel, which
would otherwise go on filling it.
"""

from __future__ import annotations

import os
from pathlib import Path

from infiniswap.device import contents, frontends, rundir
from infiniswap.device.rundir import DevicePaths
from infiniswap.device.runs import abandoned_cgroups, end_job
from infiniswap.device.spec import DeviceSpec
from infiniswap.errors import InfiniswapError, NotFoundError
from infiniswap.system import swap
from infiniswap.system.process import pidfd_ended, pidfd_open

_SWAPOFF_S_MAX = 60.0


class DeviceLostError(InfiniswapError):
    """The device's process has died while its swap area was in use."""


class Watch:
    """Tells whether a device's process lives.

    Args:
        pid: of the process.
        path: its block device.
    """

    def __init__(self, pid: int, path: str) -> None:
        self._path = Path(path)
        try:
            self._pidfd = pidfd_open(pid)
        except NotFoundError:
            self._pidfd = -1

    def ended(self, wait_s: float = 0.0) -> bool:
        """Whether the process has ended, waiting at most `wait_s` seconds for it."""
        return self._pidfd < 0 or pidfd_ended(self._pidfd, wait_s)

    def lost(self) -> bool:
        """Whether it has died; False also after an orderly stop, which ends the swap area first."""
        return self.ended() and swap.find_area(self._path) is not None

    def close(self) -> None:
        """Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def clear(paths: DevicePaths, spec: DeviceSpec | None = None) -> None:
    """Takes away what is left of a `run`'s device that has died; nothing when there is nothing.

    Jobs of runs that have died with it are ended first: their memory is there.

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
                swap.swapoff(path, timeout_s=_SWAPOFF_S_MAX)
        frontends.clear_leftovers(paths)
        contents.delete(paths, spec)
        rundir.clear(paths)
    finally:
        os.close(lock)
