# SPDX-License-Identifier: Apache-2.0
"""Far memory of a device: its front end beside the block device's, and the jobs that use it.

A job is a connection to `far.sock` in the run directory. Its other end goes to the job's processes,
whose agents say hello there (csrc/far/ring.h). The front end serves them; what is kept here are the
descriptors that a successor needs: the table of blocks, the listening socket, and each job's
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import select
import socket
from collections.abc import MutableMapping
from typing import Final

import msgspec

from infiniswap import events
from infiniswap.device.api import DeviceAnswer, FarRow
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.succession.holder import Holder
from infiniswap.engine.protocol import (
    Engine,
    FarTold,
    Frontend,
    FrontendConfig,
    FrontendInfo,
    OffLoop,
)
from infiniswap.errors import ConflictError, InfiniswapError, from_oserror
from infiniswap.units import counted

log = logging.getLogger(__name__)

JOBS_MAX: Final = 16
"""Connections at once: the holder keeps a descriptor of each, and 64 in all."""

TABLE: Final = "far-table"
SOCKET: Final = "far-socket"
_JOB: Final = "far-job-"
_PREFIX: Final = "far-"

_ALARM: Final = "far-memory"
_RETRY_S: Final = 2.0
_LOOK_S: Final = 0.05


def take_kept(descriptors: MutableMapping[str, int]) -> dict[str, int]:
    """Takes those that far memory has kept out of what the holder handed over."""
    names = [name for name in descriptors if name.startswith(_PREFIX)]
    return {name: descriptors.pop(name) for name in names}


class FarMemory:
    """One device's far memory. Methods run on the event loop.

    Args:
        far_bytes: size of its range; 0: the device has none, and nothing is done here.
        paths: of the device.
        holder: keeps what a successor needs.
        blocking: runs what blocks.
    """

    def __init__(
        self, far_bytes: int, paths: DevicePaths, holder: Holder, blocking: OffLoop
    ) -> None:
        self._bytes = far_bytes
        self._paths = paths
        self._holder = holder
        self._blocking = blocking
        self._frontend: Frontend | None = None
        self._table = -1
        self._listener: socket.socket | None = None
        self._jobs: dict[int, socket.socket] = {}  # by the number in its name
        self._hung_up: select.epoll | None = None
        self._problem = ""
        self._is_pausing = False
        self._settled = asyncio.Event()  # not during the first try of a take-over
        self._settled.set()

    # ------------------------------------------------------------------------- begin

    async def start(self, engine: Engine) -> None:
        """Serves far memory from now on; in a device that starts.

        Raises:
            InfiniswapError: what could not be made; `close` takes the rest away.
        """
        if not self._bytes:
            return
        self._table = os.memfd_create("infiniswap-far-table", os.MFD_CLOEXEC)
        await self._start_front_end(engine)
        self._holder.keep(TABLE, self._table)  # not earlier: the front end has given it its size
        self._listen()

    async def take_over(
        self, engine: Engine, kept: MutableMapping[str, int], alarms: Alarms
    ) -> None:
        """Goes on where a predecessor ended; tries until it can. The block device is served
        already, and never waits for this.

        Args:
            engine: serves.
            kept: what `take_kept` returned, now ours to close.
            alarms: of the device; the processes that have far memory wait meanwhile.
        """
        if not self._bytes:
            return
        self._table = kept.pop(TABLE, -1)
        if (listener := kept.pop(SOCKET, -1)) >= 0:
            self._listener = socket.socket(fileno=listener)
        self._jobs = {
            int(name.removeprefix(_JOB)): socket.socket(fileno=fd) for name, fd in kept.items()
        }
        unserved = list(self._jobs.values())
        self._settled.clear()
        while True:
            try:
                await self._go_on(engine, unserved)
            except InfiniswapError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    sentence = f"programs wait for their far memory; it cannot be served: {error}"
                    alarms.sound(_ALARM, sentence, events.FAR_NOT_SERVED)
            else:
                break
            finally:
                self._settled.set()
            await asyncio.sleep(_RETRY_S)
        self._problem = ""
        alarms.pop(_ALARM, None)

    async def _go_on(self, engine: Engine, unserved: list[socket.socket]) -> None:
        """What is left to do of a take-over."""
        if self._frontend is None:
            await self._start_front_end(engine)
        assert self._frontend is not None
        while unserved:
            self._frontend.serve(unserved[-1].fileno())
            unserved.pop()
        self._listen()

    async def _start_front_end(self, engine: Engine) -> None:
        config = FrontendConfig(table_fd=self._table)
        self._frontend = await self._blocking(lambda: engine.frontend("far", config))

    def _listen(self) -> None:
        """Takes jobs from now on, and notices their ends."""
        try:
            if self._listener is None:
                self._listener = self._make_listener()
                self._holder.keep(SOCKET, self._listener.fileno())
            self._listener.setblocking(False)
            self._hung_up = select.epoll()
            for job in self._jobs.values():
                self._hung_up.register(job, 0)  # its end alone: the front end reads the hellos
        except OSError as error:
            where = str(self._paths.far_socket)
            raise from_oserror("cannot serve jobs' far memory", error, where=where) from error
        loop = asyncio.get_running_loop()
        loop.add_reader(self._hung_up.fileno(), self._forget_ended)
        loop.add_reader(self._listener.fileno(), self._accept)

    def _make_listener(self) -> socket.socket:
        path = self._paths.far_socket
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)  # before it takes connections; the directory is searchable by all
            listener.listen(JOBS_MAX)
        except OSError:
            listener.close()
            raise
        return listener

    # -------------------------------------------------------------------------- jobs

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            job, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is free
            log.error("a job's connection for far memory has to wait: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_RETRY_S, self._accept_again)
            return
        answer = DeviceAnswer()
        try:
            self._serve(job)
        except InfiniswapError as error:
            answer = DeviceAnswer(error=str(error), exit_code=error.exit_code)
        with contextlib.suppress(OSError):  # the other end has gone
            job.send(msgspec.json.encode(answer), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if answer.error:
            job.close()

    def _accept_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _serve(self, job: socket.socket) -> None:
        where = f"device {self._paths.name}"
        if self._is_pausing:
            raise ConflictError("the device is being stopped", where=where)
        if len(self._jobs) >= JOBS_MAX:
            raise ConflictError(
                f"{JOBS_MAX} jobs have far memory on the device, which is the most",
                where=where,
                mend="Wait until one has ended, or leave --device out.",
            )
        assert self._frontend is not None
        assert self._hung_up is not None
        number = next(number for number in range(JOBS_MAX) if number not in self._jobs)
        self._frontend.serve(job.fileno())
        self._jobs[number] = job
        self._holder.keep(f"{_JOB}{number}", job.fileno())
        self._hung_up.register(job, 0)

    def _forget_ended(self) -> None:
        """Jobs whose every process has closed the connection: none is left to say hello."""
        assert self._hung_up is not None
        ended = {fd for fd, _ in self._hung_up.poll(0)}
        for number, job in list(self._jobs.items()):
            if job.fileno() in ended:
                del self._jobs[number]
                self._hung_up.unregister(job)
                self._holder.drop(f"{_JOB}{number}")
                job.close()

    def _info(self) -> FrontendInfo | None:
        return None if self._frontend is None else self._frontend.info()

    def row(self) -> FarRow | None:
        """What the status shows; does not wait. None: the device has no far memory."""
        if not self._bytes:
            return None
        info = self._info()
        return FarRow(
            bytes=self._bytes,
            used_bytes=0 if info is None else info.used_bytes,
            away_bytes=0 if info is None else info.away_bytes,
            jobs=len(self._jobs),
            processes=0 if info is None else info.connections,
            problem=self._problem,
            counts=dataclasses.asdict(FarTold() if info is None else info.far),
        )

    # --------------------------------------------------------------------------- end

    async def pause(self, wait_s: float) -> None:
        """Takes no further jobs, until `resume`.

        Args:
            wait_s: how long processes may take to end that were killed.

        Raises:
            ConflictError: processes have far memory; nothing has changed.
        """
        self._is_pausing = True
        await self._settled.wait()
        end_s = asyncio.get_running_loop().time() + wait_s
        while (info := self._info()) is not None and info.connections:
            if asyncio.get_running_loop().time() >= end_s:
                self._is_pausing = False
                verb = "has" if info.connections == 1 else "have"
                raise ConflictError(
                    f"{counted(info.connections, 'process')} of a job {verb} far memory on it",
                    where=f"device {self._paths.name}",
                    mend="End the job first.",
                )
            await asyncio.sleep(_LOOK_S)

    def resume(self) -> None:
        """Takes jobs again."""
        self._is_pausing = False

    async def close(self) -> None:
        """Ends the front end, before the engine. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._holder.drop(SOCKET)
        if self._hung_up is not None:
            loop.remove_reader(self._hung_up.fileno())
            self._hung_up.close()
            self._hung_up = None
        if self._frontend is not None:
            await self._blocking(self._frontend.close)
            self._frontend = None
        for number, job in self._jobs.items():
            self._holder.drop(f"{_JOB}{number}")
            job.close()
        self._jobs.clear()
        if self._table >= 0:
            os.close(self._table)
            self._table = -1
            self._holder.drop(TABLE)
