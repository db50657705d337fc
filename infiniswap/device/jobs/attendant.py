# SPDX-License-Identifier: Apache-2.0
"""The process beside a job that pages out: does for the job what needs doing while it runs.

It does two things: infiniswap.system.left_processors, and infiniswap.device.jobs.whole_blocks. It
is a process of its own because it waits for the job's pages and for locks on its memory, and a
device that has died answers nothing: the runner, which has to end the job then, must not wait. For
the same reason the runner waits only briefly for its end.

    python -m infiniswap.device.jobs.attendant CGROUP VERSION

It ends when its standard input does, which is a pipe from the runner.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from pathlib import Path
from typing import Final

from infiniswap.device.jobs.whole_blocks import BlockReader, RoomForBlocks
from infiniswap.errors import InfiniswapError
from infiniswap.policy.whole_blocks import WholeBlocks
from infiniswap.system import programs
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.left_processors import LeftProcessors, is_needed_here
from infiniswap.system.major_faults import MajorFaults

_PERIOD_S: Final = 0.5
"""The kernel strikes off at most once a second; twice as often comes soon after it may again."""

_REST: Final = 20.0
"""At least so many times as long as a look takes: a job may have thousands of processes."""

_END_S_MAX: Final = 0.5


class Attendant:
    """The runner's side: starts the process when the job has been seen to page out, and ends it.

    Args:
        cgroup: of the job.
        wanted: False: never start it.
    """

    def __init__(self, cgroup: MemoryCgroup, *, wanted: bool) -> None:
        self._cgroup = cgroup
        self._wanted = wanted
        self._process: programs.Process | None = None

    def look(self, swap_bytes: int) -> None:
        """Tells how much of the job is swapped out."""
        if not self._wanted or swap_bytes == 0:
            return
        self._wanted = False  # it is tried once
        name = "infiniswap.device.jobs.attendant"
        argv = programs.python("-m", name, str(self._cgroup.path), str(self._cgroup.version))
        with contextlib.suppress(InfiniswapError):  # the job only is slower without
            self._process = programs.start(argv, stdin=programs.PIPE, stderr=programs.DEVNULL)

    def end(self) -> None:
        """Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(programs.TimeoutExpired):
            process.wait(_END_S_MAX)
            return
        process.kill()
        with contextlib.suppress(programs.TimeoutExpired):
            process.wait(_END_S_MAX)


class _Attendance:
    """The process.

    Args:
        cgroup: of the job.

    Raises:
        InfiniswapError: the cgroup is gone.
    """

    def __init__(self, cgroup: MemoryCgroup) -> None:
        self._cgroup = cgroup
        self._left = LeftProcessors() if is_needed_here() else None
        self._pids: frozenset[int] = frozenset()
        self._room, self._has_room = RoomForBlocks(cgroup), False
        self._next_s = time.monotonic()
        self._poll = select.poll()
        self._poll.register(sys.stdin.fileno(), select.POLLIN)
        self._reader: BlockReader | None = None
        self._faults: MajorFaults | None = None
        with contextlib.suppress(InfiniswapError):  # the job only is slower without
            self._watch_faults()

    def _watch_faults(self) -> None:
        policy = WholeBlocks(self._cgroup.memory().limit_bytes or 0)
        if not policy.is_of_use:
            return
        self._faults = faults = MajorFaults()
        for ring in faults.rings:
            self._poll.register(ring, select.POLLIN)
        self._reader = BlockReader(policy, faults, time.monotonic, self._room.is_there)

    def _watch_no_faults(self) -> None:
        faults, self._faults, self._reader = self._faults, None, None
        if faults is None:
            return
        for ring in faults.rings:
            with contextlib.suppress(KeyError):
                self._poll.unregister(ring)
        faults.close()

    def run(self) -> None:
        """Until the runner ends it.

        Raises:
            InfiniswapError: the cgroup is gone.
        """
        while (self._left is not None or self._reader is not None) and self._pause():
            if time.monotonic() >= self._next_s:
                self._look()
            if self._reader is not None:
                try:
                    self._reader.look(self._pids if self._has_room else ())
                except PermissionError:
                    self._watch_no_faults()

    def _pause(self) -> bool:
        pause_s = max(0.0, self._next_s - time.monotonic())
        if self._reader is not None:
            pause_s = min(pause_s, self._reader.pause_s())
        goes_on = True
        for fd, events in self._poll.poll(pause_s * 1000):
            if fd == sys.stdin.fileno():
                goes_on = False
            elif events & ~select.POLLIN:  # its processor is gone
                self._poll.unregister(fd)
        return goes_on

    def _look(self) -> None:
        began_s = time.monotonic()
        pages_out = bool(self._cgroup.memory().swap_bytes)
        self._pids = frozenset(self._cgroup.pids() if pages_out else ())
        self._has_room = pages_out and self._room.look()
        if self._left is not None:
            try:
                self._left.strike_off(self._pids)
            except PermissionError:
                self._left = None
        now_s = time.monotonic()
        self._next_s = now_s + max(_PERIOD_S, _REST * (now_s - began_s))


def main(path: str, version: str) -> None:
    """The process."""
    with contextlib.suppress(InfiniswapError):
        _Attendance(MemoryCgroup(Path(path), int(version))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
