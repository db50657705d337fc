# SPDX-License-Identifier: Apache-2.0
"""Whether the device of a `run` still lives. Once it has died, programs whose memory is there
cannot go on: `leftovers.clear` ends them and takes the swap area away.
"""

from __future__ import annotations

import os
from pathlib import Path

from infiniswap.device.api import DeviceStatus
from infiniswap.device.spec import rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import InfiniswapError, NotFoundError
from infiniswap.system import swap
from infiniswap.system.process import pidfd_ended, pidfd_open


class DeviceLostError(InfiniswapError):
    """The device's process has died while its swap area was in use."""


class Watch:
    """Tells whether a device lives: its process, or one that will take over from it.

    Args:
        paths: of the device.
        status: the device's answer.

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
        """Whether the processes that it had at first have ended. (A process that clears its
        leftovers has the lock meanwhile.)"""
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
