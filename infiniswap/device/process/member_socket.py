# SPDX-License-Identifier: Apache-2.0
"""Serves members of the group: they run jobs on the device, each in a cgroup that this process,
which is root, makes for it.

A member is untrusted. Rules:
- who asks is what the kernel says of the connection's other end, never what a question says;
- only processes of that very user are watched, moved or ended, and what a pid stands for is
  looked at again after it has been used (a pid can come to mean another process); a program in a
  job that has become another user's (setuid) is left running;
- a job's cgroup belongs to root: a member can neither widen its limit nor put others into it;
- leaving the cgroups that it is in must lift no limit of the member's (system/cgroup_limits.py),
  whether a process begins a run or enters one;
- runs and connections are bounded per user and in all: this process serves swap space.

See docs/adr/0017-members.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from infiniswap.device.member_api import (
    LINE_BYTES_MAX,
    Ask,
    AskBegin,
    AskEnd,
    AskEnter,
    AskKill,
    AskRaise,
    AskStatus,
    Reply,
)
from infiniswap.device.process.runs import cgroup_name, end_job
from infiniswap.device.process.service import DeviceService
from infiniswap.errors import (
    ConflictError,
    InfiniswapError,
    MemoryLimitError,
    NotFoundError,
    NotPermittedError,
    UsageError,
    from_oserror,
)
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.system.acl import let_group_in
from infiniswap.system.cgroup import MemoryCgroup, put_where_its_parent_is
from infiniswap.system.cgroup_limits import check_may_enter, memory_allowed_bytes
from infiniswap.system.job_cgroup import create_job_cgroup
from infiniswap.system.process import peer_credentials, pidfd_ended, pidfd_open, process_uids
from infiniswap.units import format_size_short

log = logging.getLogger(__name__)

RUNS_PER_USER_MAX: Final = 8
RUNS_MAX: Final = 64
CONNECTIONS_PER_USER_MAX: Final = 8
CONNECTIONS_MAX: Final = 64
LOCAL_BYTES_MIN: Final = 16 * 1024 * 1024
_ASK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, as the kernel knows it."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class _Job:
    """A member's run.

    Attributes:
        allowed_bytes: the least memory limit that what has entered it was under; None: without.
    """

    uid: int
    cgroup: MemoryCgroup
    local_bytes: int
    allowed_bytes: int | None = None

    def within(self, allowed_bytes: int | None) -> int | None:
        """The lower of that limit and another."""
        found = (self.allowed_bytes, allowed_bytes)
        return min((limit for limit in found if limit is not None), default=None)


def open_owned(peer: Peer) -> int:
    """A descriptor of the peer's process, which the caller closes.

    The process that has the pid now belongs to the peer's user alone. If it is not the one that
    connected, that does no harm: the same user could have connected from it.

    Raises:
        NotFoundError: it has ended.
        NotPermittedError: it runs, or could run, with the rights of another user.
    """
    pidfd = pidfd_open(peer.pid)
    try:
        uids = process_uids(peer.pid)
        if pidfd_ended(pidfd):
            raise NotFoundError(f"process {peer.pid} has ended")
        if uids != {peer.uid}:
            raise NotPermittedError(
                f"process {peer.pid} has the rights of more than one user",
                mend="Programs that change their user cannot be run on a device without root.",
            )
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def move(peer: Peer, cgroup: MemoryCgroup) -> None:
    """Moves the peer's process into a cgroup.

    Raises:
        NotFoundError, NotPermittedError: see open_owned.
        SystemCallError: the kernel's refusal.
    """
    pidfd = open_owned(peer)
    try:
        cgroup.add(peer.pid)
        # A process keeps its pid until its parent has waited for it, so one that lives now has
        # had it all the time. Otherwise the pid may now be another user's process.
        if pidfd_ended(pidfd) and process_uids(peer.pid) != {peer.uid}:
            if peer.pid in cgroup.pids():
                log.warning("process %d came into a job's cgroup by mistake", peer.pid)
                put_where_its_parent_is(peer.pid)
            raise NotFoundError(f"process {peer.pid} has ended")
    finally:
        os.close(pidfd)


class Members:
    """Answers members' questions. Everything runs on the event loop; what blocks does not."""

    def __init__(self, service: DeviceService) -> None:
        self._service = service
        self._jobs: dict[int, _Job] = {}
        self._connections: Counter[int] = Counter()
        self._begin_lock = asyncio.Lock()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        peer = _peer(writer)
        try:
            full = (
                self._connections[peer.uid] >= CONNECTIONS_PER_USER_MAX
                or self._connections.total() >= CONNECTIONS_MAX
            )
            self._connections[peer.uid] += 1
            if not full:
                writer.write(msgspec.json.encode(await self._answer(peer, reader)) + b"\n")
                async with asyncio.timeout(_ASK_S):
                    await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # it has gone, says nothing, or does not listen
        finally:
            self._connections[peer.uid] -= 1
            self._connections += Counter()  # without those at 0
            writer.close()

    async def _answer(self, peer: Peer, reader: asyncio.StreamReader) -> Reply:
        async with asyncio.timeout(_ASK_S):
            line = await reader.readline()
        try:
            ask: Ask = decode_json(line, Ask)  # type: ignore[arg-type]
        except NotJsonError:
            return Reply(error="not a question of this API", exit_code=UsageError.exit_code)
        try:
            return await self._do(peer, ask)
        except InfiniswapError as error:
            return Reply(error=str(error), exit_code=error.exit_code)

    async def _do(self, peer: Peer, ask: Ask) -> Reply:
        service = self._service
        match ask:
            case AskStatus():
                return Reply(status=service.status())
            case AskBegin(local_bytes=local_bytes):
                async with self._begin_lock:  # limits are sums over what has begun
                    cgroup = await self._begin(peer, local_bytes)
                return Reply(cgroup=str(cgroup.path), version=cgroup.version)
            case AskEnter(run=run):
                async with self._begin_lock:
                    job = await self._admit(peer, run)
                await service.on_jobs(lambda: move(peer, job.cgroup))
            case AskRaise(local_bytes=local_bytes):
                async with self._begin_lock:
                    await self._raise(peer, local_bytes)
            case AskKill():
                job = self._job(peer, peer.pid)
                await service.on_jobs(lambda: job.cgroup.kill_of(peer.uid))
            case AskEnd():
                job = self._job(peer, peer.pid)
                left = await service.on_jobs(lambda: end_job(job.cgroup, peer.uid))
                self._jobs.pop(peer.pid, None)
                if not left:  # otherwise the clean-up after its end waits for them
                    await service.leave(peer.pid)
        return Reply()

    def _job(self, peer: Peer, run: int) -> _Job:
        """Raises NotFoundError where the peer's user has no such run."""
        job = self._jobs.get(run)
        if job is None or job.uid != peer.uid or run not in self._service.runs.pids():
            raise NotFoundError(f"process {run} is no run of yours on this device")
        return job

    async def _begin(self, peer: Peer, local_bytes: int) -> MemoryCgroup:
        service = self._service
        living = set(service.runs.pids())
        self._jobs = {pid: job for pid, job in self._jobs.items() if pid in living}
        self._check_device()
        await service.on_jobs(lambda: os.close(open_owned(peer)))
        self._check_bounds(peer, local_bytes)
        await service.on_jobs(lambda: self._check_memory(peer, local_bytes))
        # Watched before there is anything to clean up.
        service.join(peer.pid, peer.uid)
        try:
            name = cgroup_name(peer.pid)
            cgroup = await service.on_jobs(
                lambda: create_job_cgroup(name, local_bytes, member_pid=peer.pid)
            )
        except InfiniswapError:
            service.runs.leave(peer.pid)
            raise
        if peer.pid not in service.runs.pids():
            # The clean-up after its end has run, perhaps before the cgroup existed.
            await service.on_jobs(lambda: end_job(cgroup))
            raise NotFoundError(f"process {peer.pid} has ended")
        self._jobs[peer.pid] = _Job(peer.uid, cgroup, local_bytes)
        log.info("run %d of user %d begins", peer.pid, peer.uid)
        return cgroup

    async def _admit(self, peer: Peer, run: int) -> _Job:
        """The run that the peer may enter: only where it could have begun it."""
        job = self._job(peer, run)

        def check() -> int | None:
            os.close(open_owned(peer))
            check_may_enter(peer.pid, job.cgroup.path)
            return self._check_memory(peer, job.local_bytes, job)

        allowed_bytes = await self._service.on_jobs(check)
        self._job(peer, run)  # it may have ended meanwhile
        self._jobs[run] = job = replace(job, allowed_bytes=job.within(allowed_bytes))
        return job

    async def _raise(self, peer: Peer, local_bytes: int) -> None:
        job = self._job(peer, peer.pid)
        if local_bytes < job.local_bytes:
            # The kernel pages out in the name of whoever lowers a limit: here, the process that
            # serves the pages.
            raise UsageError("the memory limit of a job can only be raised")
        _check_size(local_bytes)
        await self._service.on_jobs(lambda: self._check_memory(peer, local_bytes, job))
        await self._service.on_jobs(lambda: job.cgroup.set_limit(local_bytes))
        self._jobs[peer.pid] = replace(job, local_bytes=local_bytes)

    def _check_device(self) -> None:
        spec = self._service.spec
        where = f"device {spec.name}"
        if spec.ephemeral:
            raise ConflictError(
                "it belongs to an `infiniswap run` of root's, and ends with that", where=where
            )
        if not self._service.status().swap.active:
            raise UsageError("it is not in use as swap space", where=where)

    def _check_bounds(self, peer: Peer, local_bytes: int) -> None:
        where = f"device {self._service.spec.name}"
        if peer.pid in self._jobs:
            raise ConflictError(f"process {peer.pid} has begun a run already", where=where)
        own = sum(job.uid == peer.uid for job in self._jobs.values())
        if own >= RUNS_PER_USER_MAX or len(self._jobs) >= RUNS_MAX:
            raise ConflictError(
                f"there are {own} runs of yours and {len(self._jobs)} in all; {RUNS_PER_USER_MAX} "
                f"and {RUNS_MAX} are possible",
                where=where,
                mend="Wait until one of them has ended.",
            )
        _check_size(local_bytes)

    def _check_memory(
        self, peer: Peer, local_bytes: int, instead: _Job | None = None
    ) -> int | None:
        """The least memory limit that the peer is under."""
        own = allowed = memory_allowed_bytes(peer.pid)
        if instead is not None:
            allowed = instead.within(own)
        others = [job for job in self._jobs.values() if job is not instead]
        taken = sum(job.local_bytes for job in others if job.uid == peer.uid)
        if allowed is not None and taken + local_bytes > allowed:
            more = f", of which other runs of yours have {format_size_short(taken)}"
            raise MemoryLimitError(
                f"you may use {format_size_short(allowed)} of this host's memory"
                + (more if taken else ""),
                mend="Give a smaller --local.",
            )
        return own


def _check_size(local_bytes: int) -> None:
    if not LOCAL_BYTES_MIN <= local_bytes < 1 << 62:
        raise UsageError(f"a memory limit of {local_bytes} bytes makes no sense")


def _peer(writer: asyncio.StreamWriter) -> Peer:
    sock = writer.get_extra_info("socket")
    return Peer(*peer_credentials(sock))


def group_id(name: str) -> int | None:
    """The group's number; None where there is no such group, or none is meant."""
    try:
        return grp.getgrnam(name).gr_gid if name else None
    except KeyError:
        return None


@contextlib.asynccontextmanager
async def member_socket(service: DeviceService) -> AsyncIterator[None]:
    """Serves members while the context is open; does nothing without such a group.

    Raises:
        NotPermittedError, SystemCallError: the socket cannot be made.
    """
    path, name = service.paths.member_socket, service.spec.config.device.group
    path.unlink(missing_ok=True)
    gid = await service.on_jobs(lambda: group_id(name))
    if gid is None or os.geteuid() != 0 or service.spec.ephemeral:
        yield
        return
    listening = _listen(path, gid)
    members = Members(service)
    server = await asyncio.start_unix_server(members.serve, sock=listening, limit=LINE_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def _listen(path: Path, gid: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listening.bind(str(path))
        _let_in(path, gid)
    except OSError as error:
        listening.close()
        raise from_oserror("cannot make the members' socket", error, where=str(path)) from error
    finally:
        os.umask(previous)
    return listening


def _let_in(path: Path, gid: int) -> None:
    """The unit leaves CAP_CHOWN out, because a list on the file does as well."""
    try:
        os.chown(path, -1, gid)
    except PermissionError:
        let_group_in(path, gid)
    else:
        path.chmod(0o660)
