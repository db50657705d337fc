# SPDX-License-Identifier: Apache-2.0
"""The device process: starts everything in order, serves, stops everything in the reverse order.

Start: lock, contents checked, donors asked, backup checked, engine, kernel device, memory locked,
swap. Whatever fails, or a signal, undoes what stood before it. Stop: swapoff, verify, detach,
settle, tables saved, leases given back. A stop that is refused (swapped-out data does not fit into
memory) changes nothing.

A successor (`prepare`, `take_over`) begins in the middle: its engine goes on with its
predecessor's state, its front end with what is attached, its links with their leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from infiniswap import events
from infiniswap.config_changes import Outcome
from infiniswap.control.client import ClientConfig, Identity
from infiniswap.device import frontends
from infiniswap.device.api import DeviceStatus, Ready
from infiniswap.device.donors import rdma_leaving
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.donors.probe import check_donors
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.frontends.others import Others
from infiniswap.device.off_loop import run_to_end
from infiniswap.device.process import reload
from infiniswap.device.process.assembly import make_link_config, make_mapper
from infiniswap.device.process.report import Snapshot, snapshot
from infiniswap.device.process.runs import STOP_PAUSE_S_MAX, Runs
from infiniswap.device.slabs.after_take_over import restore_links
from infiniswap.device.slabs.finder import Finder
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.device.succession.hand_over import (
    Succession,
    adopt,
    check_state,
    prepare,
    reopen,
    take_state,
    warm_up,
)
from infiniswap.device.succession.holder import LOCK, LOG, Holder, TakeOver
from infiniswap.device.succession.repairs import Repairs
from infiniswap.engine.protocol import Engine, EngineConfig
from infiniswap.errors import (
    BackupError,
    ConflictError,
    InfiniswapError,
    MemoryLimitError,
)
from infiniswap.system.process import make_swap_safe, sentences
from infiniswap.system.wakeful import Waker
from infiniswap.units import PAGE_BYTES, HostPort

log = logging.getLogger(__name__)

_NOT_KEPT = events.about(events.CONTENTS_NOT_KEPT)
_NOT_STOPPED = events.about(events.NOT_STOPPED)
_EXECUTOR_THREADS = 4
_JOB_THREADS = 2
_STOP_PAUSE_S_MIN = 1.0

T = TypeVar("T")


class DeviceService:
    """One device. Made and run by `serve`; methods run on the event loop."""

    def __init__(
        self, spec: DeviceSpec, *, own_log: bool = False, holder: Holder | None = None
    ) -> None:
        self.spec = spec
        self.holder = holder or Holder()
        self._succession = Succession(self.holder)
        self._own_log = own_log
        self.state = "starting"
        self.stopped = asyncio.Event()
        self.warnings: list[str] = []
        device = spec.config.device
        self._paths = rundir.paths_of(spec.name, device.run_dir, device.backup_dir)
        self._executor = ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix="device")
        self._started_s = time.monotonic()
        self._engine: Engine | None = None
        self._attachment: Attachment | None = None
        self._mapper: SlabMapper | None = None
        self._finder = Finder(spec, self._blocking)
        self._link_config: LinkConfig | None = None
        self._degraded: list[str] = []
        self._outcome = Outcome()  # of the last reload
        self._stop_lock = asyncio.Lock()
        self.was_kept = False  # it is started again, after a stop
        self._client: ClientConfig | None = None
        self._begun = False  # its contents may have changed
        self._start_task: asyncio.Task[object] | None = None
        self._interrupted = False
        self._began = asyncio.Event()
        self._lock_fd = -1
        self._loops: set[asyncio.Task[None]] = set()  # as long as there is an engine
        self._waker: Waker | None = None
        self._stopping: asyncio.Task[None] | None = None
        # A user's job may take its time to die; nothing that serves pages waits behind that.
        self._jobs_executor = ThreadPoolExecutor(_JOB_THREADS, thread_name_prefix="jobs")
        self.runs = Runs(self._jobs_executor, self._run_gone, directory=self._paths.runs)

    @property
    def paths(self) -> rundir.DevicePaths:
        """Paths of the device."""
        return self._paths

    async def on_jobs(self, call: Callable[[], T]) -> T:
        """Runs a call that blocks and is about jobs, outside of the event loop."""
        return await run_to_end(self._jobs_executor, call)

    async def _blocking(self, call: Callable[[], T]) -> T:
        # What undoes the call must not run beside it.
        return await run_to_end(self._executor, call)

    # ------------------------------------------------------------------------ start

    async def start(self) -> Ready:
        """Everything up to serving.

        Raises:
            InfiniswapError: what could not be done; nothing stays attached.
        """
        spec = self.spec
        self._start_task = asyncio.current_task()
        self.holder.listen(self._holder_gone)
        self._lock_fd = rundir.take_lock(self._paths)
        try:
            self._succession.keep_lock(self._lock_fd)
            if self._own_log:
                rundir.write_log(self._paths)
                self.holder.keep(LOG, 2)
            choice = frontends.choose(spec.config.device.frontend, spec.swap)
            # Watched from the first moment: a `run` that dies during this start is noticed.
            if spec.owner_pid is not None:
                self.runs.join(spec.owner_pid)
            self.was_kept = self._paths.kept.exists()
            contents.check(self._paths, spec)
            client = self._client_config()
            await self._finder.begin()
            self.warnings += await check_donors(self._finder, spec, self._identity(), client)
            await self._blocking(self._make_engine)
            self._start_mapper(client)
            self._finder.follow()
            self._start_waker()
            if spec.backup is None:
                await self._map_everything()
            attachment = self._attachment = Attachment(spec, self._paths, choice)
            engine = self._engine
            assert engine is not None
            rundir.write_record(self._paths.record, spec)
            self._begun = True
            await self._blocking(lambda: contents.begin(self._paths, spec))
            await self._blocking(lambda: attachment.attach_device(engine))
            self._start_repairs(attachment)
            self._succession.keep_device(spec, attachment)
            self._make_safe(choice.frontend)
            if spec.swap:
                await self._blocking(attachment.attach_swap)
        except BaseException:
            await self._undo_start()
            raise
        self._start_task = None
        self.warnings += attachment.warnings
        return Ready(
            ok=True,
            path=attachment.path,
            frontend=choice.frontend,
            why=choice.why,
            warnings=self.warnings,
        )

    def _holder_gone(self) -> None:
        if self.interrupt_start():
            log.error("the start is undone")

    # -------------------------------------------------------------------- succession

    def prepare(self, state_fd: int, note: bytes) -> None:
        """As standby: everything that can be made before its turn, so that nothing has to be later.
        Blocking; there is no event loop yet.

        Raises:
            InfiniswapError: this code cannot take the device over.
        """
        self._client = self._client_config()  # reads the secret
        self._succession.note = note
        state = reopen(state_fd)
        try:
            check_state(state, self.spec)
            self._engine = self._new_engine(state, standby=True)
        finally:
            os.close(state)
        choice = frontends.Choice(self.spec.config.device.frontend, "taken over")
        self._attachment = prepare(Attachment(self.spec, self._paths, choice), self._engine, note)
        self.holder.hold_rings(self._attachment.kernel.rings())
        warm_up(self._executor, _EXECUTOR_THREADS)
        self._degraded = sentences(make_swap_safe())

    async def take_over(self, turn: TakeOver) -> None:
        """In the predecessor's place.

        Raises:
            HopelessError: nobody could.
            InfiniswapError: this process could not; nothing is lost by that.
        """
        # The spec may have changed since it prepared for its turn.
        self.spec, descriptors = self._succession.begin(turn, self.spec)
        self.holder.listen(self._holder_gone)
        self._lock_fd = descriptors.pop(LOCK, -1)
        self._begun = True
        spec, engine, attachment = self.spec, self._engine, self._attachment
        assert engine is not None
        assert attachment is not None
        assert self._client is not None
        await self._blocking(lambda: take_state(engine, spec.backup))
        self._start_mapper(self._client)
        assert self._mapper is not None
        restore_links(engine, self._mapper, self._make_link)
        if spec.backup is None:
            # What is suspended could be read from nowhere else.
            await asyncio.gather(*(link.settled() for link in self._mapper.lenders.links))
        await self._blocking(lambda: adopt(attachment, descriptors))
        self._succession.done()
        self._finder.follow()
        self._start_repairs(attachment)
        self._start_waker()
        self.runs.adopt()

    async def renew(self) -> None:
        """A standby of the code that is installed now, ready to take over.

        Raises:
            ConflictError: the device does not serve, or there can be none; nothing has changed.
        """
        if self.state != "serving":
            raise ConflictError(f"the device is {self.state}", where=f"device {self.spec.name}")
        await self.holder.renew()

    async def reload(self) -> Outcome:
        """Takes over what of the configuration can change while it runs.

        Raises:
            ConflictError: it does not serve.
        """
        mapper, attachment = self._mapper, self._attachment
        if self.state != "serving" or mapper is None or attachment is None:
            raise ConflictError(f"the device is {self.state}", where=f"device {self.spec.name}")
        spec, self._outcome = await self._blocking(lambda: reload.plan(self.spec))
        if self._outcome.applied and self._link_config is not None:
            self.spec = spec
            self._link_config = reload.retune(spec, mapper, self._link_config, self._waker)
            self._finder.tell(spec, mapper.lenders, self._make_link)
            rundir.write_record(self._paths.record, spec)
            self._succession.keep_spec(spec, attachment)
        self._outcome.log("device")
        return self._outcome

    def _client_config(self) -> ClientConfig:
        config = self.spec.config
        return ClientConfig(secret=config.secret(), connect_s=max(config.cluster.ask_s, 0.5))

    def _identity(self) -> Identity:
        return Identity(self.spec.device_id, self.spec.name, socket.gethostname())

    def _make_engine(self) -> None:
        if self.spec.backup is not None:
            contents.check_backup_is_ours(self.spec, self.was_kept)
        state = self._succession.make_state(self._paths)
        try:
            self._engine = self._new_engine(state)
            self._succession.keep_state(state)
        finally:
            if state >= 0:
                os.close(state)
        contents.load(self._engine, self._paths, self.spec)

    def _new_engine(self, state_fd: int, *, standby: bool = False) -> Engine:
        from infiniswap.engine.native import NativeEngine, preload_rdma

        spec, config = self.spec, self.spec.config.device
        if config.transport != "tcp":
            preload_rdma()
        return NativeEngine(
            EngineConfig(
                size_bytes=spec.size_bytes,
                slab_bytes=config.slab_bytes,
                staging_pages=config.staging_bytes // PAGE_BYTES,
                request_bytes_max=config.request_bytes,
                requests_max=config.requests_max,
                backup_write_bytes_max=config.backup_write_bytes,
                backup_writers=config.backup_writers,
                backup_readers=config.backup_readers,
                hedge_us_min=config.hedge_ms * 1000,
                no_backup=spec.backup is None,
                state_fd=state_fd,
                standby=standby,
            ),
            None if standby else spec.backup,
        )

    def _start_mapper(self, client: ClientConfig) -> None:
        assert self._engine is not None
        now_s = asyncio.get_running_loop().time()
        self._mapper = make_mapper(self.spec, self._engine, now_s)
        self._link_config = make_link_config(self.spec, self._identity(), client)
        self._finder.start(self.spec, self._mapper.lenders, self._make_link)
        self._loop("mapper", self._run_mapper())
        if self.spec.config.device.transport != "tcp":
            self._loop("RDMA devices", rdma_leaving.let_go(self._engine, self._blocking))

    def _loop(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._loops.add(asyncio.create_task(work, name=name))

    def _make_link(self, donor: HostPort) -> DonorLink:
        assert self._engine is not None
        assert self._mapper is not None
        assert self._link_config is not None
        return DonorLink(donor, self._engine, self._mapper, self._link_config, self._executor)

    async def _run_mapper(self) -> None:
        assert self._mapper is not None
        while True:
            try:
                await self._mapper.run()
            except Exception:
                # The page path does not need us; a bug here must not take swap space down.
                log.exception("the mapper failed; it is started again")
                await asyncio.sleep(1.0)

    def _start_repairs(self, attachment: Attachment) -> None:
        assert self._mapper is not None
        repairs = Repairs(attachment.kernel, self.holder, self._mapper.events, self._blocking)
        self._loop("repair", repairs.run())
        others = Others(attachment, self._mapper.alarms, self._blocking)
        self._loop("others", others.run(self._stop_lock, lambda: self.state == "serving"))

    def _start_waker(self) -> None:
        engine = self._engine
        assert engine is not None
        self._waker = Waker(lambda: engine.pages_moved()[0], self.spec.config.device.keep_awake)
        self._loop("waker", self._waker.run())

    async def _map_everything(self) -> None:
        """Without a backup a page has nowhere else to go: no late binding."""
        assert self._mapper is not None
        # Before is_eager, as two must not place one slab.
        for slab in range(self.spec.slab_count):
            if not await self._mapper.placer.place(slab):
                raise MemoryLimitError(
                    f"the donors can take {slab} of {self.spec.slab_count} slabs, and without a "
                    "backup all of them need a donor",
                    mend="Use a smaller --size, more donors, or a backup.",
                )
        self._mapper.is_eager = True

    def _make_safe(self, frontend: str) -> None:
        """Locks memory and so on; what this host refuses is named in `status`."""
        self._degraded = sentences(make_swap_safe())
        if frontend == "fuse" and self.spec.swap and not self.spec.ephemeral:
            self.warnings.append(
                "the fuse front end keeps its promises for programs under a memory limit; under "
                "pressure on the whole host it may have to wait for memory"
            )
        self.warnings += self._degraded
        if self._waker is not None and self._waker.problem is not None:
            self.warnings.append(str(self._waker.problem))

    def begin(self) -> bool:
        """From here on it can be joined and stopped; False: the start was interrupted, stop it."""
        self.state = "serving"
        self._began.set()
        if self._interrupted:
            return False
        self.holder.serving()
        if self._succession.is_successor:
            self._run_gone()  # the last one may have gone while nobody watched
        return True

    async def _undo_start(self) -> None:
        self._start_task = None  # undoing is not interrupted in its turn
        attachment = self._attachment
        if attachment is not None:
            await self._undo_swap(attachment)
            with contextlib.suppress(InfiniswapError):
                await self._blocking(attachment.detach_device)
        engine = self._engine
        if self.was_kept and self._begun and engine is not None:
            try:
                await self._blocking(lambda: contents.save(engine, self._paths, self.spec))
            except InfiniswapError as error:
                log.error("the contents could not be kept: %s", error, extra=_NOT_KEPT)
        await self._close_engine()
        if not self.was_kept:
            with contextlib.suppress(InfiniswapError):
                contents.delete(self._paths, self.spec)
        await self.runs.close()
        rundir.clear(self._paths)
        self._unlock()

    async def _undo_swap(self, attachment: Attachment) -> None:
        # Whatever is swapped out there already is lost when this process ends: no giving up.
        while True:
            try:
                await self._blocking(attachment.detach_swap)
                return
            except InfiniswapError as error:
                log.error("the start cannot be undone yet: %s", error)
            await asyncio.sleep(_STOP_PAUSE_S_MIN)

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def _close_engine(self) -> None:
        await self._finder.close()
        for task in self._loops:
            task.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        self._loops.clear()
        engine = self._engine
        if self._mapper is not None and engine is not None:
            # Drains are still reported while the links give their slabs back.
            loop = asyncio.get_running_loop()
            loop.add_reader(engine.eventfd, self._mapper.events.take)
            await asyncio.gather(*(link.close() for link in self._mapper.lenders.links))
            loop.remove_reader(engine.eventfd)
        if engine is not None:
            await self._blocking(engine.close)
            self._engine = None

    # ------------------------------------------------------------------------- stop

    def join(self, pid: int) -> None:
        """A `run` uses the device from now on.

        Raises:
            ConflictError: it is being stopped.
            NotFoundError: there is no such run.
        """
        if self.state != "serving":
            raise ConflictError(f"the device is {self.state}", where=f"device {self.spec.name}")
        self.runs.join(pid)

    async def leave(self, pid: int) -> None:
        """A `run` has ended; the last one of an ephemeral device stops it.

        Raises:
            InfiniswapError: it cannot be stopped now; it will be tried again.
        """
        self.runs.leave(pid)
        if self.spec.ephemeral and self.runs.idle:
            try:
                await self.stop(remove=True, unless_used=True)
            except InfiniswapError:
                self._run_gone()
                raise

    def _run_gone(self) -> None:
        if not self.spec.ephemeral or not self.runs.idle or self.interrupt_start():
            return
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_alone(), name="stop")

    async def _stop_alone(self) -> None:
        """Stops a device that nobody uses any more; tried again until it works."""
        pause_s = _STOP_PAUSE_S_MIN
        while not self.stopped.is_set() and self.runs.idle:
            try:
                await self.stop(remove=True, unless_used=True)
            except InfiniswapError as error:
                log.error("the device cannot be stopped yet: %s", error, extra=_NOT_STOPPED)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, STOP_PAUSE_S_MAX)
        self._stopping = None

    def interrupt_start(self) -> bool:
        """Makes a start that is under way undo itself; False when there is none. A take-over cannot
        be undone, only be followed by a stop."""
        if self.state != "starting" or self._succession.is_successor:
            return False
        self._interrupted = True
        if self._start_task is not None:
            self._start_task.cancel()
            self._start_task = None
        return True

    async def stop(self, *, remove: bool, unless_used: bool = False) -> None:
        """Swapoff, verify, detach, settle, save.

        Args:
            remove: the contents, too.
            unless_used: do nothing when a `run` uses it.

        Raises:
            BackupError: it has stopped, and its contents could not be kept.
            InfiniswapError: it is still in use, and goes on serving.
        """
        if self._succession.is_successor:
            await self._began.wait()
        async with self._stop_lock:
            if self.stopped.is_set() or (unless_used and not self.runs.idle):
                return
            attachment, engine = self._attachment, self._engine
            assert attachment is not None
            assert engine is not None
            self.state = "stopping"
            try:
                await self._blocking(attachment.detach_swap)
                await self._blocking(attachment.check_unused)
                if not remove and contents.keeps_contents(self.spec):
                    # While it can still be refused: a backup that fails is no place to stop at.
                    await self._blocking(lambda: engine.settle(contents.SETTLE_MS_MAX))
                # The point of no return for a `run` that comes now: it starts a device anew.
                self.holder.ending()
                await self._blocking(attachment.detach_device)
            except InfiniswapError:
                self.state = "serving"
                self.holder.serving()
                raise
            await self._finish(remove)

    async def _finish(self, remove: bool) -> None:
        assert self._engine is not None
        spec, engine = self.spec, self._engine
        failure: InfiniswapError | None = None
        try:
            if not remove:
                await self._blocking(lambda: contents.save(engine, self._paths, spec))
        except InfiniswapError as error:
            log.error("the contents could not be kept: %s", error, extra=_NOT_KEPT)
            failure = error
        await self._close_engine()
        try:
            if remove:
                contents.delete(self._paths, spec)
        except InfiniswapError as error:
            failure = error
        await self.runs.close()
        rundir.clear(self._paths)
        self._unlock()
        self.state = "stopped"
        self.stopped.set()
        if failure is not None:
            raise BackupError(
                f"the device {spec.name} has stopped, but its contents could not be "
                f"{'deleted' if remove else 'kept'}: {failure}"
            ) from failure

    # ----------------------------------------------------------------------- status

    def status(self) -> DeviceStatus:
        """Everything that can be known of the device; does not wait."""
        return self.snapshot().status

    def snapshot(self) -> Snapshot:
        """The same, and the engine's figures."""
        engine, mapper, attachment = self._engine, self._mapper, self._attachment
        if engine is None or mapper is None or attachment is None:
            raise ConflictError(f"the device {self.spec.name} is {self.state}")
        problem = self._waker.problem if self._waker else None
        return snapshot(
            self.spec,
            engine,
            mapper,
            attachment,
            state=self.state,
            uptime_s=time.monotonic() - self._started_s,
            degraded=self._degraded
            + ([str(problem)] if problem else [])
            + self._outcome.sentences("device")
            + self._succession.degraded()
            + self._finder.degraded(),
            awake=self._waker is not None and self._waker.awake,
            runs=self.runs.pids(),
            succession=self._succession.row(),
        )
