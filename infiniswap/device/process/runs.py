# SPDX-License-Identifier: Apache-2.0
"""The `run` commands that use a device, watched by pidfd.

The kernel tells the device when a `run` ends for any reason (its job, Ctrl-C, kill -9, its
terminal). The device then ends what is left in the job's cgroup and removes the cgroup. It finds a
run's cgroup by its name alone, so it makes no difference how far the run had come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import InfiniswapError, NotFoundError
from infiniswap.system.cgroup import RUN_PREFIX, MemoryCgroup, run_cgroup_name
from infiniswap.system.job_cgroup import find_job_cgroups
from infiniswap.system.process import named, pidfd_ended, pidfd_open, start_time

log = logging.getLogger(__name__)

CLEAN_TRIES = 60
"""Each takes up to 20 s, when processes wait in the kernel, and a pause of CLEAN_PAUSE_S."""

CLEAN_PAUSE_S = 1.0

LEFT_PAUSE_S = 15.0
"""How often a cgroup is looked at whose last programs may not be ended."""

STOP_PAUSE_S_MAX = 15.0
"""Longest pause between two tries to stop a device that no run uses."""


def cgroup_name(pid: int) -> str:
    """Name of the cgroup of the living `run` with this pid; no other run ever has it.

    Raises:
        NotFoundError: no such process.
    """
    started = start_time(pid)
    if started is None:
        raise NotFoundError(f"there is no process {pid}")
    return run_cgroup_name(f"{pid}-{started}")


def cgroup_name_or_none(pid: int) -> str | None:
    """As cgroup_name, None when there is no such process."""
    try:
        return cgroup_name(pid)
    except NotFoundError:
        return None


def abandoned_cgroups() -> tuple[MemoryCgroup, ...]:
    """Those of runs that have ended.

    Raises:
        UnavailableError: no memory cgroups on this host.
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    return tuple(cgroup for cgroup in find_job_cgroups() if not _has_owner(cgroup.name))


def _has_owner(name: str) -> bool:
    pid, _, started = name.removeprefix(RUN_PREFIX).partition("-")
    if not pid.isdecimal() or str(start_time(int(pid))) != started:
        return False
    try:
        pidfd = pidfd_open(int(pid))
    except NotFoundError:
        return False
    try:
        return not pidfd_ended(pidfd)  # a zombie has a start time, too
    finally:
        os.close(pidfd)


def end_job(cgroup: MemoryCgroup, uid: int | None = None) -> tuple[int, ...]:
    """SIGKILL to what is left in a job's cgroup, then removes that.

    Args:
        cgroup: of the job.
        uid: the member whose job it is; None: root's.

    Returns:
        Programs that the member started and that have become another user's. The member may not
        end them, so neither do we, and they keep the cgroup.

    Raises:
        DeadlineError: something does not die.
        ConflictError, NotPermittedError, SystemCallError: it cannot be removed.
    """
    left: tuple[int, ...] = ()
    if uid is None:
        cgroup.kill()
    else:
        left = cgroup.kill_of(uid)
    if not left:
        cgroup.remove()
    return left


@dataclass(frozen=True, slots=True)
class _Run:
    pid: int
    pidfd: int
    cgroup_name: str
    uid: int | None  # of a member; None: root's

    @property
    def name(self) -> str:
        """Names it for good: pid and start."""
        return self.cgroup_name.removeprefix(RUN_PREFIX)


class Runs:
    """The runs of a device. Methods run on the event loop; cgroups are emptied in `executor`.

    Args:
        executor: for calls that block.
        changed: called in the background, after a run has ended and its cgroup is removed.
        find: every job cgroup there is.
        directory: where a successor finds which runs there are; None: nowhere. Their names say it
            all, and names are in the kernel's memory: no file is read while pages cannot be.
    """

    def __init__(
        self,
        executor: Executor,
        changed: Callable[[], None],
        find: Callable[[], tuple[MemoryCgroup, ...]] = find_job_cgroups,
        directory: Path | None = None,
    ) -> None:
        self._executor = executor
        self._changed = changed
        self._find = find
        self._directory = directory
        self._runs: dict[int, _Run] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def pids(self) -> list[int]:
        """Pids of the living runs, sorted."""
        return sorted(self._runs)

    @property
    def idle(self) -> bool:
        """No run, and none being cleaned up after."""
        return not self._runs and not self._cleaning

    def join(self, pid: int, uid: int | None = None) -> None:
        """Begins to watch a run; nothing new when it is watched already.

        Args:
            pid: of the run.
            uid: of the member whose run it is; None: root's.

        Raises:
            NotFoundError: no such process.
        """
        known = self._runs.get(pid)
        if known is not None and not pidfd_ended(known.pidfd):
            return
        pidfd = pidfd_open(pid)
        try:
            run = _Run(pid, pidfd, cgroup_name(pid), uid)
        except NotFoundError:
            os.close(pidfd)
            raise
        if known is not None:  # another process with that pid came before the news of the end
            self._ended(pid)
        self._watch(run)
        self._note(run)

    def _watch(self, run: _Run) -> None:
        self._runs[run.pid] = run
        asyncio.get_running_loop().add_reader(run.pidfd, self._ended, run.pid)

    def _note(self, run: _Run) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            path = self._directory / run.name
            if run.uid is None:
                path.touch(mode=0o600)
            else:
                path.unlink(missing_ok=True)
                path.symlink_to(str(run.uid))  # which is in the kernel's memory, as names are
        except OSError as error:
            log.error("a successor would not know of run %d: %s", run.pid, error.strerror)

    def _strike(self, run: _Run) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                (self._directory / run.name).unlink()

    def watch_again(self) -> None:
        """Watches the runs that a predecessor watched; cleans up after those that have ended."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            for name in sorted(entry.name for entry in self._directory.iterdir()):
                if name.partition("-")[0].isdecimal():  # else it is no record of ours
                    self._watch_again(name)

    def _watch_again(self, name: str) -> None:
        pid = int(name.partition("-")[0])
        try:
            pidfd = pidfd_open(pid)
        except NotFoundError:
            pidfd = -1
        run = _Run(pid, pidfd, run_cgroup_name(name), self._uid_of(name))
        if pidfd >= 0 and cgroup_name_or_none(pid) == run.cgroup_name:
            self._watch(run)
            return
        if pidfd >= 0:
            os.close(pidfd)
        self._clean_up(run)

    def _uid_of(self, name: str) -> int | None:
        assert self._directory is not None
        try:
            return int(os.readlink(self._directory / name))
        except (OSError, ValueError):
            return None

    def leave(self, pid: int) -> None:
        """A run has ended in order and left nothing behind."""
        run = self._runs.pop(pid, None)
        if run is not None:
            self._forget(run)
            self._strike(run)

    def leave_behind(self, pid: int) -> None:
        """Does what leave does, and lets what follows go on in the background."""
        self.leave(pid)
        self._changed()

    def _forget(self, run: _Run) -> None:
        asyncio.get_running_loop().remove_reader(run.pidfd)
        os.close(run.pidfd)

    def _ended(self, pid: int) -> None:
        run = self._runs.pop(pid)
        self._forget(run)
        self._clean_up(run)

    def _clean_up(self, run: _Run) -> None:
        task = asyncio.create_task(self._clean(run), name=f"clean up after run {run.pid}")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cleaning up after a run failed", exc_info=error)
        self._changed()

    async def _clean(self, run: _Run) -> None:
        loop = asyncio.get_running_loop()
        told: tuple[int, ...] = ()
        for _ in range(CLEAN_TRIES):
            try:
                while left := await loop.run_in_executor(self._executor, self._end_job, run):
                    if left != told:
                        log.warning(
                            "process %s has the rights of another user: it is left running, and "
                            "keeps the cgroup of run %d",
                            ", ".join(named(pid) for pid in left[:10]),
                            run.pid,
                        )
                    told = left
                    if await self._closes_within(LEFT_PAUSE_S):
                        return
                self._strike(run)
                log.warning("run %d has ended, and what was left of its job is gone now", run.pid)
                return
            except InfiniswapError as error:
                log.error("the job of run %d cannot be ended yet: %s", run.pid, error)
            await asyncio.sleep(CLEAN_PAUSE_S)

    async def _closes_within(self, time_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time_s):
                await self._closing.wait()
        return self._closing.is_set()

    def _end_job(self, run: _Run) -> tuple[int, ...]:
        found = (cgroup for cgroup in self._find() if cgroup.name == run.cgroup_name)
        return next((end_job(cgroup, run.uid) for cgroup in found), ())

    async def close(self) -> None:
        """Stops watching; waits for clean-ups under way, but for no program of another user's."""
        self._closing.set()
        for run in self._runs.values():
            self._forget(run)
        self._runs.clear()
        if self._cleaning:
            await asyncio.wait(self._cleaning)
