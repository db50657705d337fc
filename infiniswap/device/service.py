# SPDX-License-Identifier: Apache-2.0
"""The device process: starts everything in order, serves, stops everything in the reverse order.

Start: lock, donors asked, backup checked, engine, kernel device, memory locked, swap. Whatever
fails undoes what stood before it. Stop: swapoff, verify, detach, settle, tables saved, leases
given back. A stop that is refused (swapped-out data does not fit into memory) changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from infiniswap.config import read_secret
from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect
from infiniswap.device import rundir
from infiniswap.device.api import DeviceStatus, DonorRow, Ready, SwapRow
from infiniswap.device.attach import Attachment, choose_frontend
from infiniswap.device.links import DonorLink, LinkConfig
from infiniswap.device.mapper import SlabMapper
from infiniswap.device.runs import Runs
from infiniswap.device.spec import DeviceSpec
from infiniswap.engine.protocol import Engine, EngineConfig
from infiniswap.errors import (
    ConflictError,
    InfiniswapError,
    MemoryLimitError,
    NoDonorError,
)
from infiniswap.policy.activity import ActivityConfig
from infiniswap.system.backup import check_backup
from infiniswap.system.process import make_swap_safe
from infiniswap.units import PAGE_BYTES, HostPort

log = logging.getLogger(__name__)

_EXECUTOR_THREADS = 4
_THREAD_STACK_BYTES = 512 * 1024
_SETTLE_MS_MAX = 120_000

T = TypeVar("T")


class DeviceService:
    """One device. Made and run by `serve`; methods run on the event loop."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.state = "starting"
        self.stopped = asyncio.Event()
        self.warnings: list[str] = []
        self._paths = rundir.paths_of(spec.name, spec.config.run_dir, spec.config.backup_dir)
        self._executor = ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix="device")
        self._started_s = time.monotonic()
        self._engine: Engine | None = None
        self._attachment: Attachment | None = None
        self._mapper: SlabMapper | None = None
        self._degraded: list[str] = []
        self._stop_lock = asyncio.Lock()
        self._remove = spec.ephemeral
        self._lock_fd = -1
        self._mapper_task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.runs = Runs(self._executor, self._run_gone)

    @property
    def paths(self) -> rundir.DevicePaths:
        """Paths of the device."""
        return self._paths

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    # ------------------------------------------------------------------------ start

    async def start(self) -> Ready:
        """Everything up to serving.

        Raises:
            InfiniswapError: what could not be done; nothing stays attached.
        """
        spec = self.spec
        choice = choose_frontend(spec.frontend, spec.swap)
        self._lock_fd = rundir.take_lock(self._paths)
        try:
            # Watched from the first moment: a `run` that dies during this start is noticed.
            if spec.owner_pid is not None:
                self.runs.join(spec.owner_pid, "")
            client = self._client_config()
            await self._check_donors(client)
            self._engine = await self._blocking(self._make_engine)
            self._start_mapper(client)
            if spec.backup is None:
                await self._map_everything()
            attachment = Attachment(spec, self._paths, choice)
            self._attachment = attachment
            engine = self._engine
            await self._blocking(lambda: attachment.attach_device(engine))
            self._make_safe(choice.frontend)
            if spec.swap:
                await self._blocking(attachment.attach_swap)
            rundir.write_record(self._paths.record, spec)
        except BaseException:
            await self._undo_start()
            raise
        self.state = "serving"
        self.warnings += attachment.warnings
        return Ready(
            ok=True,
            path=attachment.path,
            frontend=choice.frontend,
            why=choice.why,
            warnings=self.warnings,
        )

    def _client_config(self) -> ClientConfig:
        path = self.spec.secret_file
        secret = None if path is None else read_secret(Path(path))
        return ClientConfig(secret=secret, connect_s=max(self.spec.ask_s, 0.5))

    def _identity(self) -> Identity:
        return Identity(self.spec.device_id, self.spec.name, socket.gethostname())

    async def _check_donors(self, client: ClientConfig) -> None:
        """At least one must answer, and none may be of the wrong kind: a mistake is told now."""
        donors = self.spec.donors
        if not donors:
            raise NoDonorError(
                "no donor is named",
                mend="Give --donors HOST[:PORT],... or set `peers` under [cluster] in the "
                "configuration.",
            )
        results = await asyncio.gather(*(self._probe(donor, client) for donor in donors))
        problems = [problem for problem in results if problem is not None]
        for problem in problems:
            if not isinstance(problem, NoDonorError):
                raise problem
        if len(problems) == len(donors):
            if len(problems) == 1:
                raise problems[0]
            raise NoDonorError(
                "none of the donors can be reached: " + "; ".join(str(p) for p in problems)
            )
        self.warnings += [f"{problem}" for problem in problems]

    async def _probe(self, donor: HostPort, client: ClientConfig) -> InfiniswapError | None:
        try:
            session = await connect(
                donor,
                self._identity(),
                client,
                QuietHandler(),
                slab_bytes=self.spec.slab_bytes,
            )
        except InfiniswapError as error:
            return error
        await session.close()
        return None

    def _make_engine(self) -> Engine:
        from infiniswap.engine.native import NativeEngine

        spec, config = self.spec, self.spec.config
        if spec.backup is not None:
            check_backup(Path(spec.backup), spec.size_bytes)
        engine = NativeEngine(
            EngineConfig(
                size_bytes=spec.size_bytes,
                slab_bytes=spec.slab_bytes,
                staging_pages=config.staging_bytes // PAGE_BYTES,
                request_bytes_max=config.request_bytes,
                requests_max=config.requests_max,
                backup_write_bytes_max=config.backup_write_bytes,
                backup_writers=config.backup_writers,
                backup_readers=config.backup_readers,
                no_backup=spec.backup is None,
            ),
            spec.backup,
        )
        try:
            self._load_contents(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def _load_contents(self, engine: Engine) -> None:
        """What a stopped device kept. From here on only a clean stop makes it valid again."""
        tables = self._paths.tables
        if self.spec.ephemeral or not tables.exists():
            return
        if not self.spec.swap:  # swap space is made anew: its old contents mean nothing
            engine.load_tables(str(tables))
        tables.unlink()

    def _start_mapper(self, client: ClientConfig) -> None:
        assert self._engine is not None
        spec, policy = self.spec, self.spec.policy
        loop = asyncio.get_running_loop()
        self._mapper = SlabMapper(
            self._engine,
            spec.slab_count,
            ActivityConfig(policy.activity_alpha, policy.period_s, policy.hot_pages_per_s),
            policy.choices,
            random.Random(),
            loop.time(),
        )
        link_config = LinkConfig(
            identity=self._identity(),
            client=client,
            slab_bytes=spec.slab_bytes,
            slab_count=spec.slab_count,
            queues=spec.config.queues,
            connect_ms=spec.config.connect_ms,
            request_ms=spec.config.request_ms,
            suspend_s=policy.suspend_s,
        )
        self._mapper.links = [
            DonorLink(donor, self._engine, self._mapper, link_config, self._executor)
            for donor in spec.donors
        ]
        self._mapper_task = asyncio.create_task(self._run_mapper(), name="mapper")

    async def _run_mapper(self) -> None:
        assert self._mapper is not None
        while True:
            try:
                await self._mapper.run()
            except Exception:
                # The page path does not need us; a bug here must not take swap space down.
                log.exception("the mapper failed; it is started again")
                await asyncio.sleep(1.0)

    async def _map_everything(self) -> None:
        """Without a backup a page has nowhere else to go: no late binding."""
        assert self._mapper is not None
        for slab in range(self.spec.slab_count):
            if not await self._mapper.place(slab):
                raise MemoryLimitError(
                    f"the donors can take {slab} of {self.spec.slab_count} slabs, and without a "
                    "backup all of them need a donor",
                    mend="Use a smaller --size, more donors, or a backup.",
                )

    def _make_safe(self, frontend: str) -> None:
        """Locks memory and so on; what this host refuses is named in `status`."""
        self._degraded = [str(outcome) for outcome in make_swap_safe()]
        if frontend == "fuse" and self.spec.swap and not self.spec.ephemeral:
            self.warnings.append(
                "the fuse front end keeps its promises for programs under a memory limit; under "
                "pressure on the whole host it may have to wait for memory"
            )
        self.warnings += self._degraded

    async def _undo_start(self) -> None:
        attachment = self._attachment
        if attachment is not None:
            with contextlib.suppress(InfiniswapError):
                await self._blocking(attachment.detach_swap)
            with contextlib.suppress(InfiniswapError):
                await self._blocking(attachment.detach_device)
        await self._close_engine()
        if self.spec.backup_owned and self.spec.backup is not None and not self._kept():
            backup = Path(self.spec.backup)
            await self._blocking(lambda: backup.unlink(missing_ok=True))
        await self.runs.close()
        rundir.clear(self._paths)
        self._unlock()

    def _kept(self) -> bool:
        return self._paths.kept.exists()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def _close_engine(self) -> None:
        if self._mapper_task is not None:
            self._mapper_task.cancel()
            await asyncio.wait({self._mapper_task})
            self._mapper_task = None
        engine = self._engine
        if self._mapper is not None and engine is not None:
            # Drains are still reported while the links give their slabs back.
            loop = asyncio.get_running_loop()
            loop.add_reader(engine.eventfd, self._mapper.take_events)
            await asyncio.gather(*(link.close() for link in self._mapper.links))
            loop.remove_reader(engine.eventfd)
        if engine is not None:
            await self._blocking(engine.close)
            self._engine = None

    # ------------------------------------------------------------------------- stop

    def join(self, pid: int, cgroup: str) -> None:
        """A `run` uses the device from now on.

        Raises:
            ConflictError: it is being stopped.
            NotFoundError, UsageError: see Runs.join.
        """
        if self.state != "serving":
            raise ConflictError(f"the device is {self.state}", where=f"device {self.spec.name}")
        self.runs.join(pid, cgroup)

    async def leave(self, pid: int) -> None:
        """A `run` has ended; the last one of an ephemeral device stops it.

        Raises:
            InfiniswapError: it cannot be stopped now; it will be tried again.
        """
        self.runs.leave(pid)
        if self.spec.ephemeral and self.runs.idle:
            try:
                await self.stop(remove=True)
            except InfiniswapError:
                self._run_gone()
                raise

    def _run_gone(self) -> None:
        if self.spec.ephemeral and self.runs.idle and self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_alone(), name="stop")

    async def _stop_alone(self) -> None:
        """Stops a device that nobody uses any more; tried again until it works."""
        while not self.stopped.is_set() and self.runs.idle:
            try:
                await self.stop(remove=True)
            except InfiniswapError as error:
                log.error("the device cannot be stopped yet: %s", error)
                await asyncio.sleep(2.0)
        self._stopping = None

    async def stop(self, *, remove: bool) -> None:
        """Swapoff, verify, detach, settle, save.

        Raises:
            InfiniswapError: it is still in use, and goes on serving.
        """
        async with self._stop_lock:
            if self.stopped.is_set():
                return
            attachment = self._attachment
            assert attachment is not None
            self.state = "stopping"
            try:
                await self._blocking(attachment.detach_swap)
                await self._blocking(attachment.check_unused)
                # The point of no return for a `run` that comes now: it starts a device anew.
                await self._blocking(attachment.detach_device)
            except InfiniswapError:
                self.state = "serving"
                raise
            await self._finish(remove)

    async def _finish(self, remove: bool) -> None:
        assert self._engine is not None
        spec, engine = self.spec, self._engine
        if not remove and spec.backup is not None:
            try:
                await self._blocking(lambda: engine.settle(_SETTLE_MS_MAX))
                await self._blocking(lambda: engine.save_tables(str(self._paths.tables)))
                rundir.write_record(self._paths.kept, spec)
            except InfiniswapError as error:
                log.error("the contents could not be kept: %s", error)
        await self._close_engine()
        if remove:
            delete_kept(self._paths, spec)
        await self.runs.close()
        rundir.clear(self._paths)
        self._unlock()
        self.state = "stopped"
        self.stopped.set()

    # ----------------------------------------------------------------------- status

    def status(self) -> DeviceStatus:
        """Everything that can be known of the device; does not wait."""
        engine, mapper, attachment = self._engine, self._mapper, self._attachment
        if engine is None or mapper is None or attachment is None:
            raise ConflictError(f"the device {self.spec.name} is {self.state}")
        stats = engine.stats()
        p50_us, p99_us = engine.latency_us("read", (0.5, 0.99))
        served = stats["pages_in_remote"] + stats["pages_in_staging"] + stats["pages_in_backup"]
        remotes = {info.remote: info for info in engine.remotes()}
        donors = []
        for link in mapper.links:
            info = remotes.get(link.remote) if link.remote is not None else None
            donors.append(
                DonorRow(
                    address=str(link.address),
                    name=link.name,
                    state=link.state,
                    detail=link.detail,
                    slabs=len(link.mapped),
                    read_pages=info.read_pages if info else 0,
                    write_pages=info.write_pages if info else 0,
                    errors=info.errors if info else 0,
                )
            )
        return DeviceStatus(
            name=self.spec.name,
            device_id=self.spec.device_id,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started_s, 1),
            size_bytes=self.spec.size_bytes,
            slab_bytes=self.spec.slab_bytes,
            frontend=attachment.choice.frontend,
            path=attachment.path,
            backup=self.spec.backup,
            swap=SwapRow(
                active=attachment.swap_active,
                priority=attachment.priority,
                used_bytes=attachment.swap_used_bytes(),
            ),
            ephemeral=self.spec.ephemeral,
            state=self.state,
            slabs=mapper.slab_states(),
            donors=donors,
            stats=stats,
            remote_share=stats["pages_in_remote"] / served if served else None,
            page_in_us_p50=p50_us,
            page_in_us_p99=p99_us,
            degraded=self._degraded,
            alarms=list(mapper.alarms.values()),
            runs=self.runs.pids(),
        )


def delete_kept(paths: rundir.DevicePaths, spec: DeviceSpec) -> None:
    """Deletes the contents of a device that does not run."""
    for path in (paths.tables, paths.kept):
        path.unlink(missing_ok=True)
    if spec.backup_owned and spec.backup is not None:
        Path(spec.backup).unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def _signals(service: DeviceService) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def stop(name: str) -> None:
        log.info("%s: stopping", name)
        try:
            await service.stop(remove=service.spec.ephemeral)
        except InfiniswapError as error:
            log.error("not stopped: %s", error)

    def on_signal(number: signal.Signals) -> None:
        task = asyncio.create_task(stop(number.name), name=number.name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    # A terminal that closes is no reason to take swap space away.
    loop.add_signal_handler(signal.SIGHUP, lambda: log.info("SIGHUP: nothing to reload"))
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def serve(spec: DeviceSpec, ready: Callable[[Ready], None]) -> int:
    """Runs a device until it is stopped.

    Args:
        ready: called once, when it serves.

    Raises:
        InfiniswapError: it could not be started.
    """
    from infiniswap.device.server import control_socket

    service = DeviceService(spec)
    async with _signals(service):
        answer = await service.start()
        try:
            async with control_socket(service):
                ready(answer)
                log.info("device %s serves %s", spec.name, answer.path)
                await service.stopped.wait()
        except BaseException:
            if not service.stopped.is_set():
                await service.stop(remove=spec.ephemeral)
            raise
    return 0


def prepare_process() -> None:
    """Before any thread exists: small stacks, as all of them will be locked."""
    threading.stack_size(_THREAD_STACK_BYTES)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
