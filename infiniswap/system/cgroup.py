# SPDX-License-Identifier: Apache-2.0
"""Memory cgroups for jobs: made with a limit, watched, emptied and removed.

They are made at the top of what is visible of the hierarchy, not below the caller's own cgroup: a
limit somewhere above would otherwise run out first and the job's limit would not be the one that
was asked for (and on version 2 a cgroup with processes in it can have no children with
controllers).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
    UsageError,
    from_oserror,
)
from infiniswap.system.files import PROC, read_text, try_read_text, try_write_text, write_text
from infiniswap.system.memory import CgroupMemory, cgroup_memory, memory_hierarchy
from infiniswap.system.process import (
    may_end,
    parent_pid,
    pidfd_ended,
    pidfd_open,
    pidfd_signal,
)
from infiniswap.units import PAGE_BYTES, counted

RUN_PREFIX = "infiniswap-run-"
SWAPPINESS = 100
"""For jobs on version 1, where it is per cgroup (60 by default): 100 values anonymous pages and
file cache alike. What a job swaps out comes back from a donor's memory at least as fast as file
pages come back from disk, so there is no reason to prefer dropping file cache."""
FILES_FIRST = 1
"""Swappiness of jobs with far memory on version 1: the kernel takes page cache before memory of
programs. With 0 it would kill the job before it swaps."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_POLL_S = 0.02
_APART = "ended"
"""Name of the cgroup below a job's for what is ended while other processes of it stay."""


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """One cgroup of ours.

    Attributes:
        path: its directory.
        version: 1 or 2.
    """

    path: Path
    version: int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    def add(self, pid: int) -> None:
        """Moves a process, with all its threads, into it. Memory that the process has already stays
        charged where it was, so this comes before the job's own work.

        Raises:
            NotFoundError: no such process.
            NotPermittedError, SystemCallError: the kernel's refusal.
        """
        what = f"cannot move process {pid} into the job's cgroup"
        try:
            with (self.path / "cgroup.procs").open("w") as file:
                file.write(str(pid))
        except ProcessLookupError as error:
            raise NotFoundError(f"there is no process {pid}") from error
        except OSError as error:
            raise from_oserror(what, error, where=str(self.path)) from error

    def pids(self) -> tuple[int, ...]:
        """Every process in it and below; empty when the cgroup is gone."""
        found: list[int] = []
        for directory in self._tree():
            text = try_read_text(directory / "cgroup.procs") or ""
            found.extend(int(line) for line in text.split() if line.isdecimal())
        return tuple(pid for pid in found if pid > 0)

    def memory(self) -> CgroupMemory:
        """Its figures now.

        Raises:
            NotPermittedError, SystemCallError: it is gone.
        """
        return cgroup_memory(self.path, self.version)

    def set_limit(self, limit_bytes: int) -> None:
        """Changes the limit. Lowering it pages out at once and may take a while.

        Raises:
            NotPermittedError, SystemCallError: the kernel's refusal (EBUSY: cannot get there).
        """
        file = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        write_text(self.path / file, str(limit_bytes), "cannot set the memory limit")

    def set_swappiness(self, value: int) -> None:
        """Sets how readily the kernel swaps on version 1; version 2 has no such setting."""
        if self.version == 1:
            try_write_text(self.path / "memory.swappiness", str(value))

    def allow_reclaim(self, uid: int) -> None:
        """Lets a user's processes write memory.reclaim on version 2.

        A failure is ignored: the job is slower, no more.
        """
        if self.version == 2:
            with contextlib.suppress(OSError):
                os.chown(self.path / "memory.reclaim", uid, -1)

    def kill(self, *, timeout_s: float = 10.0) -> None:
        """SIGKILL to all in it, until it is empty.

        Raises:
            DeadlineError: something did not die in time.
            NotPermittedError, SystemCallError: the kernel's refusal.
        """
        end_s = time.monotonic() + timeout_s
        while pids := self.pids():
            if not try_write_text(self.path / "cgroup.kill", "1"):  # Linux 5.14, version 2
                for pid in pids:
                    self._kill_member(pid)
            self._wait(pids, end_s, timeout_s)

    def kill_of(self, uid: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
        """SIGKILL to all that this user could end without us, until none of it is left.

        Returns:
            The others: programs that have become another user's (setuid), such as root's.

        Raises:
            DeadlineError, NotPermittedError, SystemCallError: see kill.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            may = {pid: may_end(uid, pid) for pid in self.pids()}
            others = tuple(pid for pid, may_be in may.items() if may_be is False)
            if not others:
                # Not self.kill: one that asks somebody else comes back to here.
                MemoryCgroup.kill(self, timeout_s=max(0.0, end_s - time.monotonic()))
                return ()
            own = tuple(pid for pid, may_be in may.items() if may_be)
            if not own:
                return others
            self._kill_some(own, uid)
            self._wait(own, end_s, timeout_s)

    def _wait(self, pids: tuple[int, ...], end_s: float, timeout_s: float) -> None:
        if time.monotonic() >= end_s:
            raise DeadlineError(
                f"{counted(len(pids), 'process')} did not end within {timeout_s:g} s of SIGKILL: "
                + ", ".join(str(pid) for pid in pids[:10]),
                where=str(self.path),
                mend="They wait in the kernel, most likely for a page of a swap area that "
                "does not answer: see dmesg.",
            )
        time.sleep(_POLL_S)

    def _kill_some(self, pids: tuple[int, ...], uid: int) -> None:
        """SIGKILL to these, where this user may end them. A device has no CAP_KILL where there is
        cgroup.kill, so they go to a cgroup below, which is killed."""
        apart = MemoryCgroup(self.path / _APART, self.version)
        with contextlib.suppress(OSError):  # this user's, who signals
            apart.path.mkdir(mode=0o755, exist_ok=True)
        has_kill = (apart.path / "cgroup.kill").exists()
        for pid in pids:
            with self._held(pid) as pidfd:
                if pidfd is None or not may_end(uid, pid):
                    continue
                if not has_kill:
                    pidfd_signal(pidfd, signal.SIGKILL)
                    continue
                with contextlib.suppress(NotFoundError):
                    apart.add(pid)
                if pidfd_ended(pidfd) and pid in apart.pids():  # another process has its number
                    put_where_its_parent_is(pid)
        if has_kill:
            write_text(apart.path / "cgroup.kill", "1", "cannot end the job's processes")

    def _kill_member(self, pid: int) -> None:
        with self._held(pid) as pidfd:
            if pidfd is not None:
                pidfd_signal(pidfd, signal.SIGKILL)

    @contextlib.contextmanager
    def _held(self, pid: int) -> Iterator[int | None]:
        """A descriptor of one process that is in here, whatever becomes of its number."""
        try:
            pidfd = pidfd_open(pid)
        except NotFoundError:
            yield None
            return
        try:
            yield pidfd if pid in self.pids() else None
        finally:
            os.close(pidfd)

    def remove(self, *, timeout_s: float = 10.0) -> None:
        """Removes it and what is below; nothing to do when it is gone. It must be empty.

        Raises:
            ConflictError: there still are processes in it.
            DeadlineError: the kernel kept it busy.
            NotPermittedError, SystemCallError: the kernel's refusal.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                for directory in reversed(self._tree()):
                    with contextlib.suppress(FileNotFoundError):
                        directory.rmdir()
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise from_oserror(
                        "cannot remove the job's cgroup", error, where=str(self.path)
                    ) from error
            # Processes that have just died still count for a moment.
            if time.monotonic() >= deadline:
                pids = self.pids()
                if pids:
                    raise ConflictError(
                        f"it still has {counted(len(pids), 'process')}", where=str(self.path)
                    )
                raise DeadlineError(
                    f"it could not be removed within {timeout_s:g} s", where=str(self.path)
                )
            time.sleep(_POLL_S)

    def _tree(self) -> list[Path]:
        """Its directory and those below, from the top."""
        return [Path(directory) for directory, _, _ in os.walk(self.path)]


def create_memory_cgroup(name: str, limit_bytes: int, *, proc: Path = PROC) -> MemoryCgroup:
    """Makes an empty cgroup with a memory limit and unlimited swap.

    Args:
        name: directory name; a job's is `run_cgroup_name(id)`.
        limit_bytes: of memory; swapped-out memory does not count.
        proc: root of the proc file system.

    Raises:
        UsageError: not a usable name or limit.
        ConflictError: it exists.
        UnavailableError: this host has no memory cgroups that can be used.
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a cgroup: letters, digits, `_`, `.` and `-`")
    if limit_bytes < PAGE_BYTES:
        raise UsageError(f"a memory limit of {limit_bytes} bytes is below one page")
    hierarchy = memory_hierarchy(proc=proc)
    if hierarchy.version == 2:
        _enable_v2(hierarchy.mount_point)
    cgroup = MemoryCgroup(hierarchy.mount_point / name, hierarchy.version)
    try:
        cgroup.path.mkdir(mode=0o755)
    except FileExistsError as error:
        raise ConflictError(
            "a cgroup of this name exists",
            where=str(cgroup.path),
            mend="Another job of this name runs, or one ended badly: then remove it with rmdir.",
        ) from error
    except OSError as error:
        raise from_oserror(
            "cannot make a memory cgroup", error, where=str(hierarchy.mount_point)
        ) from error
    try:
        cgroup.set_limit(limit_bytes)
        cgroup.set_swappiness(SWAPPINESS)
    except BaseException:
        cgroup.remove()
        raise
    return cgroup


def _enable_v2(top: Path) -> None:
    """Lets the children of the highest visible cgroup have the memory controller."""
    control = top / "cgroup.subtree_control"
    if "memory" in read_text(control, "cannot read the cgroup's controllers").split():
        return
    try:
        with control.open("w") as file:
            file.write("+memory")
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise UnavailableError(
                "the memory controller cannot be enabled below a cgroup that has processes in it",
                where=str(top),
                mend="In a container, share the host's cgroups with it (docker run "
                "--cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup:rw).",
            ) from error
        raise from_oserror(
            "cannot enable the memory controller", error, where=str(control)
        ) from error


def run_cgroup_name(run_id: str) -> str:
    """Name of the cgroup of the `infiniswap run` with this id."""
    return RUN_PREFIX + run_id


def find_run_cgroups(*, proc: Path = PROC) -> tuple[MemoryCgroup, ...]:
    """Every job cgroup there is; one whose `pids()` is empty and whose run is gone is stale.

    Raises:
        UnavailableError: no memory cgroups on this host.
        NotPermittedError, SystemCallError: /proc could not be read.
    """
    hierarchy = memory_hierarchy(proc=proc)
    return tuple(
        MemoryCgroup(path, hierarchy.version)
        for path in sorted(hierarchy.mount_point.glob(RUN_PREFIX + "*"))
        if path.is_dir()
    )


def put_where_its_parent_is(pid: int, *, proc: Path = PROC) -> None:
    """Moves a process to the memory cgroup of its parent, which is where a new one begins.

    Raises:
        NotFoundError: it, or its parent, has ended.
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    parent = parent_pid(pid, proc=proc)
    if parent is None:
        raise NotFoundError(f"there is no process {pid}")
    hierarchy = memory_hierarchy(proc=proc, pid=parent)
    MemoryCgroup(hierarchy.own, hierarchy.version).add(pid)
