# SPDX-License-Identifier: Apache-2.0
"""The `run` commands that use a device, watched by pidfd.

Whatever ends a `run` - its job, Ctrl-C, kill -9, its terminal - the device learns it from the
kernel, ends what is left in the job's cgroup and removes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.system.cgroup import RUN_PREFIX, MemoryCgroup, find_run_cgroups, run_cgroup_name
from infiniswap.system.process import pidfd_open

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    pid: int
    pidfd: int
    cgroup: Path | None


class Runs:
    """Everything runs on the event loop; cgroups are emptied in `executor`.

    Args:
        changed: called after a run has gone and its cgroup has been removed.
    """

    def __init__(self, executor: Executor, changed: Callable[[], None]) -> None:
        self._executor = executor
        self._changed = changed
        self._runs: dict[int, _Run] = {}
        self._cleaning: set[asyncio.Task[None]] = set()

    def pids(self) -> list[int]:
        """Pids of the living runs, sorted."""
        return sorted(self._runs)

    @property
    def idle(self) -> bool:
        """No run, and none being cleaned up after."""
        return not self._runs and not self._cleaning

    def join(self, pid: int, cgroup: str) -> None:
        """Begins to watch a run; again with a cgroup once it has one.

        Raises:
            NotFoundError: no such process.
            UsageError: the cgroup is none of ours.
        """
        path = Path(cgroup) if cgroup else None
        if path is not None and not path.name.startswith(RUN_PREFIX):
            raise UsageError(f"{cgroup} is no cgroup of a run")
        known = self._runs.get(pid)
        if known is not None:
            known.cgroup = path or known.cgroup
            return
        run = _Run(pid, pidfd_open(pid), path)
        self._runs[pid] = run
        asyncio.get_running_loop().add_reader(run.pidfd, self._ended, pid)

    def leave(self, pid: int) -> None:
        """A run has ended in order and left nothing behind."""
        run = self._runs.pop(pid, None)
        if run is not None:
            self._forget(run)

    def _forget(self, run: _Run) -> None:
        asyncio.get_running_loop().remove_reader(run.pidfd)
        os.close(run.pidfd)

    def _ended(self, pid: int) -> None:
        run = self._runs.pop(pid)
        self._forget(run)
        task = asyncio.create_task(self._clean(run), name=f"clean up after run {pid}")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        self._changed()

    async def _clean(self, run: _Run) -> None:
        # By name, too: it may have died between making its cgroup and telling us.
        name = run_cgroup_name(str(run.pid))
        cgroup = next(
            (c for c in find_run_cgroups() if c.path == run.cgroup or c.name == name), None
        )
        if cgroup is None:
            return
        log.warning("run %d has ended without cleaning up; its job is ended", run.pid)
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, _remove, cgroup)
        except InfiniswapError as error:
            log.error("the job's cgroup cannot be removed: %s", error)

    async def close(self) -> None:
        """Stops watching; waits for clean-ups under way."""
        for run in self._runs.values():
            self._forget(run)
        self._runs.clear()
        if self._cleaning:
            await asyncio.wait(self._cleaning)


def _remove(cgroup: MemoryCgroup) -> None:
    cgroup.kill()
    cgroup.remove()
