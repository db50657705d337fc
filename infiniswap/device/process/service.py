# SPDX-License-Identifier: Apache-2.0
"""The requests that a device process serves: begin, join, leave, reload, restart, stop, status.

A stop goes strictly backwards: swapoff, verify, detach, settle, tables saved, leases given back. A
stop that is refused (swapped-out data does not fit into memory) changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from infiniswap import events
from infiniswap.code_versions import current_interpreter
from infiniswap.config_changes import Outcome
from infiniswap.device.api import DeviceStatus, Ready
from infiniswap.device.off_loop import run_to_end
from infiniswap.device.process import reload, take_over
from infiniswap.device.process.metrics_access import MetricsAccess
from infiniswap.device.process.parts import Parts
from infiniswap.device.process.report import DeviceSnapshot, snapshot
from infiniswap.device.process.runs import STOP_PAUSE_S_MAX, Runs
from infiniswap.device.process.start import Start
from infiniswap.device.spec import contents
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.device.succession.hand_over import Left
from infiniswap.device.succession.holder import Holder, TakeOver
from infiniswap.errors import BackupError, ConflictError, InfiniswapError
from infiniswap.system.surroundings.limits import check_room

log = logging.getLogger(__name__)

_NOT_STOPPED = events.about(events.NOT_STOPPED)
_JOB_THREADS = 2
_STOP_PAUSE_S_MIN = 1.0
_FAR_END_S_MAX = 10.0
"""How long the killed processes of a job may take to end."""

T = TypeVar("T")


class DeviceService:
    """One device. Made and run by `life`; methods run on the event loop."""

    def __init__(
        self, spec: DeviceSpec, *, own_log: bool = False, holder: Holder | None = None
    ) -> None:
        self._parts = Parts(spec, holder or Holder())
        self.stopped = asyncio.Event()
        self._metrics = MetricsAccess()
        self._started_s = time.monotonic()
        self._serving_since_s = time.time()
        self._outcome = Outcome()  # of the last reload
        self._began = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        # A user's job may take its time to die; nothing that serves pages waits behind that.
        self._jobs_executor = ThreadPoolExecutor(_JOB_THREADS, thread_name_prefix="jobs")
        self.runs = Runs(self._jobs_executor, self._run_gone, directory=self.paths.runs)
        self._start = Start(self._parts, self.runs, own_log=own_log)

    @property
    def spec(self) -> DeviceSpec:
        """The device with the configuration that is in force."""
        return self._parts.spec

    @property
    def paths(self) -> DevicePaths:
        """Paths of the device."""
        return self._parts.paths

    @property
    def holder(self) -> Holder:
        """The parent process; one that is not present for a device without a standby."""
        return self._parts.holder

    @property
    def was_kept(self) -> bool:
        """Whether it was started again after a stop."""
        return self._parts.was_kept

    async def on_jobs(self, call: Callable[[], T]) -> T:
        """Runs a call that blocks and is about jobs, outside of the event loop."""
        return await run_to_end(self._jobs_executor, call)

    # ------------------------------------------------------------------------- begin

    def load(self) -> None:
        """Before a start: reads secret or certificate, and what the metrics port needs. Blocking.

        Raises:
            ConfigError: something cannot be used.
        """
        self._parts.make_client(is_start=True)
        self._read_metrics()
        if self._metrics.failure is not None:
            raise self._metrics.failure

    async def start(self) -> Ready:
        """Everything up to serving.

        Raises:
            InfiniswapError: what could not be done; nothing stays attached.
        """
        self.holder.listen(self._holder_gone)
        return await self._start.run()

    def _holder_gone(self) -> None:
        if self.interrupt_start():
            log.error("the start is undone")

    def interrupt_start(self) -> bool:
        """Makes a start that is under way undo itself; False when there is none. A take-over cannot
        be undone, only be followed by a stop."""
        if self._parts.state != "starting" or self._parts.succession.is_successor:
            return False
        self._start.interrupt()
        return True

    def prepare(self, state_fd: int, key_fd: int, left: Left) -> None:
        """See take_over.prepare; also reads what the metrics port needs."""
        take_over.prepare(self._parts, state_fd, key_fd, left)
        self._read_metrics()

    async def take_over(self, turn: TakeOver) -> None:
        """See take_over.take_over."""
        self.holder.listen(self._holder_gone)
        await take_over.take_over(self._parts, self.runs, turn)

    def begin(self) -> bool:
        """From here on it can be joined and stopped; False: the start was interrupted, stop it."""
        self._parts.state = "serving"
        self._parts.start_certificate(self._certificate_renewed)
        self._serving_since_s = time.time()
        self._began.set()
        if self._start.interrupted:
            return False
        self.holder.serving()
        if self._parts.succession.is_successor:
            self._parts.keep_spec()  # the predecessor may have shown something else
            self._run_gone()  # the last run may have ended while no process watched
        return True

    # ------------------------------------------------------------------ while it serves

    def _require_serving(self) -> None:
        if self._parts.state != "serving":
            where = f"device {self.spec.name}"
            raise ConflictError(f"the device is {self._parts.state}", where=where)

    async def renew(self) -> None:
        """A standby of the code that new commands run, ready to take over.

        Raises:
            ConflictError: the device does not serve, or there can be none; nothing has changed.
            MemoryLimitError, UnavailableError: a limit leaves no room for it.
        """
        self._require_serving()
        check_room(os.getpid(), 1)  # beside the standby, which goes when the new one is ready
        await self.holder.renew(current_interpreter())

    async def reload(self) -> Outcome:
        """Takes over what of the configuration can change while it runs.

        Raises:
            ConflictError: it does not serve.
            ConfigError: the files of secrets changed while they were read.
        """
        self._require_serving()
        spec, self._outcome = await self._parts.blocking(lambda: reload.plan(self.spec))
        has_other_keys = has_other_metrics = False
        if self._outcome.error is None:
            has_other_keys = await self._parts.blocking(lambda: self._parts.shown.read(spec.config))
            has_other_metrics = await self._parts.blocking(self._read_metrics)
            self._metrics.show()
            news = self._parts.shown.news(has_changed=has_other_keys)
            self._outcome = dataclasses.replace(self._outcome, contents=news)
        if self._outcome.applied or has_other_keys:
            self._parts.retune(spec, has_other_keys=has_other_keys)
        self._outcome.log("device")
        if has_other_metrics:
            log.info("the metrics port has another certificate or token")
        if has_other_keys or has_other_metrics:
            await self._renew_standby()
        return self._outcome

    async def _certificate_renewed(self) -> None:
        self._parts.use_client()
        await self._parts.blocking(self._read_metrics)
        self._metrics.show()
        self._parts.keep_spec()
        await self._renew_standby()

    def _read_metrics(self) -> bool:
        """As MetricsAccess.read. Blocking."""
        if not self.spec.has_metrics_port:
            return False
        return self._metrics.read(self.spec.config, self._parts.shown.client.credentials)

    async def metrics_access(self) -> MetricsAccess:
        """What the metrics port shows and asks for: of before, or read again where that could not
        be used.

        Raises:
            ConfigError: it cannot be used now either.
        """
        if self._metrics.now is None:
            await self._parts.blocking(self._read_metrics)
        if self._metrics.now is None and self._metrics.failure is not None:
            raise self._metrics.failure
        return self._metrics

    async def _renew_standby(self) -> None:
        """The standby has the former keys in its memory, and will have no time to read files."""
        if not self.holder.present:
            return
        try:
            await self.holder.renew()
        except ConflictError as error:
            log.warning(
                "the standby has the former secret, certificate or token: %s; run `infiniswap "
                "device reload %s` again",
                error,
                self.spec.name,
            )

    def join(self, pid: int, uid: int | None = None) -> None:
        """A `run` uses the device from now on; of the member with this uid, or root's.

        Raises:
            ConflictError: it is being stopped.
            NotFoundError: there is no such run.
        """
        self._require_serving()
        self.runs.join(pid, uid)

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

    def status(self) -> DeviceStatus:
        """Everything that can be known of the device; does not wait."""
        return self.snapshot().status

    def snapshot(self) -> DeviceSnapshot:
        """The status, and what the metrics need besides."""
        parts = self._parts
        if not parts.are_made:
            raise ConflictError(f"the device {self.spec.name} is {parts.state}")
        return snapshot(
            parts,
            started_s=self._serving_since_s,
            uptime_s=time.monotonic() - self._started_s,
            notes=[*self._outcome.sentences("device"), *self._metrics.degraded()],
            runs=self.runs.pids(),
        )

    # -------------------------------------------------------------------------- stop

    def _run_gone(self) -> None:
        if not self.spec.ephemeral or not self.runs.idle or self.interrupt_start():
            return
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_unused(), name="stop")

    async def _stop_unused(self) -> None:
        """Stops a device that no run uses; tries until it works."""
        pause_s = _STOP_PAUSE_S_MIN
        while not self.stopped.is_set() and self.runs.idle:
            try:
                await self.stop(remove=True, unless_used=True)
            except InfiniswapError as error:
                log.error("the device cannot be stopped yet: %s", error, extra=_NOT_STOPPED)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, STOP_PAUSE_S_MAX)
        self._stopping = None

    async def stop(self, *, remove: bool, unless_used: bool = False) -> None:
        """Swapoff, verify, detach, settle, save.

        Args:
            remove: the contents, too.
            unless_used: do nothing when a `run` uses it.

        Raises:
            BackupError: it has stopped, and its contents could not be kept.
            InfiniswapError: it is still in use, and goes on serving.
        """
        parts = self._parts
        if parts.succession.is_successor:
            await self._began.wait()
        async with parts.stop_lock:
            if self.stopped.is_set() or (unless_used and not self.runs.idle):
                return
            parts.state = "stopping"
            try:
                # The job comes first: what it has far ends with it, and need not come back.
                await parts.far.pause(_FAR_END_S_MAX if unless_used else 0.0)
                await self._detach(remove)
            except InfiniswapError:
                parts.far.resume()
                parts.state = "serving"
                self.holder.serving()
                raise
            failure = await parts.end(self.runs, keep=not remove, remove=remove)
            parts.state = "stopped"
            self.stopped.set()
            if failure is not None:
                raise BackupError(
                    f"the device {self.spec.name} has stopped, but its contents could not be "
                    f"{'deleted' if remove else 'kept'}: {failure}"
                ) from failure

    async def _detach(self, remove: bool) -> None:
        parts, attachment = self._parts, self._parts.attachment
        assert attachment is not None
        await parts.blocking(attachment.detach_swap)
        # A `run`'s device always ends: nothing of a stopped device may keep it.
        removes = remove and not self.spec.ephemeral
        await parts.blocking(lambda: attachment.check_unused(removes=removes))
        if not remove and contents.keeps_contents(self.spec):
            # While it can still be refused: a backup that fails is no place to stop at.
            await parts.blocking(lambda: parts.engine.settle(contents.SETTLE_MS_MAX))
            await parts.blocking(lambda: parts.key.keep(parts.paths, parts.spec))
        # The point of no return for a `run` that comes now: it starts a device of its own.
        self.holder.ending()
        await parts.blocking(attachment.detach_device)
