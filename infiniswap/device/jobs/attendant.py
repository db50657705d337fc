# SPDX-License-Identifier: Apache-2.0
"""The process beside a job that pages out: does for the job what needs doing while it runs.

Now that is one thing, infiniswap.system.left_processors. It is a process of its own because it
waits for locks on the job's memory, and their holder may wait for a page: the runner, which has to
end the job then, must not. For the same reason the runner waits only briefly for its end.

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

from infiniswap.errors import InfiniswapError
from infiniswap.system import programs
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.left_processors import LeftProcessors, is_needed_here

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
        self._wanted = wanted and is_needed_here()
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


def attend(cgroup: MemoryCgroup, left: LeftProcessors) -> None:
    """One look at the job.

    Raises:
        PermissionError: no rights for it.
        InfiniswapError: the cgroup is gone.
    """
    if cgroup.memory().swap_bytes:
        left.strike_off(cgroup.pids())


def main(path: str, version: str) -> None:
    """The process."""
    cgroup, left = MemoryCgroup(Path(path), int(version)), LeftProcessors()
    stdin = select.poll()
    stdin.register(sys.stdin.fileno(), select.POLLIN)
    rest_s = _PERIOD_S
    with contextlib.suppress(PermissionError, InfiniswapError):
        while not stdin.poll(rest_s * 1000):
            began_s = time.monotonic()
            attend(cgroup, left)
            rest_s = max(_PERIOD_S, _REST * (time.monotonic() - began_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
