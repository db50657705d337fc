# SPDX-License-Identifier: Apache-2.0
"""The parts of a device process: the engine, the mapper with its links, and the loops around them.

A start or a take-over makes them one by one; `end` ends all of them, in the reverse order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from infiniswap import events
from infiniswap.control.client import ClientConfig, Identity
from infiniswap.control.host_name import host_name
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.donors.transports import allowed, watches
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.frontends.taken_away import TakenAway
from infiniswap.device.off_loop import run_to_end
from infiniswap.device.process.far import FarMemory
from infiniswap.device.process.runs import Runs
from infiniswap.device.process.self_report import SelfReport
from infiniswap.device.process.shown import Shown, tend_certificate
from infiniswap.device.process.tend import tend_key
from infiniswap.device.slabs.finder import Finder
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.device.spec import contents, rundir
from infiniswap.device.spec.device_key import DeviceKey
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.device.succession.hand_over import Succession
from infiniswap.device.succession.holder import KEY, Holder
from infiniswap.device.succession.repairs import Repairs
from infiniswap.device.succession.standby import warm_up
from infiniswap.engine.protocol import Engine, EngineConfig
from infiniswap.errors import InfiniswapError, MemoryLimitError
from infiniswap.policy.ahead import MapAhead
from infiniswap.policy.refill import Refill
from infiniswap.system.keep_awake import KeepAwake
from infiniswap.system.process import make_swap_safe, sentences
from infiniswap.units import PAGE_BYTES, HostPort, counted

log = logging.getLogger(__name__)

_NOT_KEPT = events.about(events.CONTENTS_NOT_KEPT)
_EXECUTOR_THREADS = 4

T = TypeVar("T")


class Parts:
    """The parts of one device; methods run on the event loop unless they say that they block.

    Attributes:
        spec: the device with the configuration that is in force.
        state: starting, serving, stopping or stopped.
        stop_lock: held while it is stopped.
        was_kept: it is started again after a stop.
        begun: its contents may have changed.
        key: that seals its pages.
        attachment: None until there is something to attach.
        lock_fd: of the device's name; -1: not taken.
        degraded: swap-safety measures that this host refuses.
        far: far memory, if the device has any.
    """

    def __init__(self, spec: DeviceSpec, holder: Holder) -> None:
        device = spec.config.device
        self.spec = spec
        self.paths = rundir.paths_of(spec.name, device.run_dir, device.backup_dir)
        self.holder = holder
        self.succession = Succession(holder)
        self.state = "starting"
        self.stop_lock = asyncio.Lock()
        self.was_kept = False
        self.begun = False
        self.key = DeviceKey()
        self.attachment: Attachment | None = None
        self.lock_fd = -1
        self.degraded: list[str] = []
        self.warnings: list[str] = []
        self.finder = Finder(spec, self.blocking)
        self.keep_awake: KeepAwake | None = None
        self.far = FarMemory(spec.far_bytes, self.paths, holder, self.blocking)
        self._executor = ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix="device")
        self._shown: Shown | None = None
        self._engine: Engine | None = None
        self._mapper: SlabMapper | None = None
        self._link_config: LinkConfig | None = None
        self._loops: set[asyncio.Task[None]] = set()  # as long as there is an engine

    @property
    def engine(self) -> Engine:
        """The engine, once it is made."""
        assert self._engine is not None
        return self._engine

    @property
    def mapper(self) -> SlabMapper:
        """The mapper, once it is started."""
        assert self._mapper is not None
        return self._mapper

    @property
    def are_made(self) -> bool:
        """Whether there is an engine, a mapper and something to attach."""
        return None not in (self._engine, self._mapper, self.attachment)

    @property
    def identity(self) -> Identity:
        """The identity that donors see."""
        return Identity(self.spec.device_id, self.spec.name, host_name(), self.spec.use)

    async def blocking(self, call: Callable[[], T]) -> T:
        """Runs a call that blocks outside of the event loop, to its end even when cancelled."""
        return await run_to_end(self._executor, call)

    def warm_up(self) -> None:
        """Starts the threads for `blocking` now. Blocking."""
        warm_up(self._executor, _EXECUTOR_THREADS)

    def make_client(self, *, is_start: bool, kept: bytes = b"") -> ClientConfig:
        """Makes what connections to donors need; reads secret or certificate. Blocking. See Shown.

        Raises:
            ConfigError: it cannot be used; at a start also a certificate that is out of date.
        """
        config = self.spec.config
        connect_s = max(config.cluster.ask_s, 0.5)
        self._shown = Shown(config, connect_s, is_start=is_start, kept=kept)
        return self._shown.client

    @property
    def shown(self) -> Shown:
        """What donors are shown, once `make_client` was called."""
        assert self._shown is not None
        return self._shown

    # ------------------------------------------------------------------------ engine

    def make_engine(self) -> None:
        """The engine of a start, with the contents that were kept. Blocking.

        Raises:
            BackupError: the backup, or what was kept, cannot be used.
            InfiniswapError: the engine cannot be made.
        """
        if self.spec.backup is not None:
            contents.check_backup_is_ours(self.spec, self.was_kept)
        state = self.succession.make_state(self.paths)
        try:
            self._engine = _new_engine(self.spec, state, self.key.fd, standby=False)
            self.succession.keep_state(state)
            self.succession.keep_key(self.key.fd)
        finally:
            if state >= 0:
                os.close(state)
        contents.load(self._engine, self.paths, self.spec)

    def make_standby_engine(self, state_fd: int) -> None:
        """The engine of a standby, which takes over the state in that file later. Blocking."""
        self._engine = _new_engine(self.spec, state_fd, self.key.fd, standby=True)

    # ---------------------------------------------------------------- mapper and links

    def start_mapper(self) -> None:
        """The mapper with links to the donors that are known, and its loop."""
        self._mapper = make_mapper(self.spec, self.engine, asyncio.get_running_loop().time())
        self._link_config = LinkConfig(
            identity=self.identity,
            client=self.shown.client,
            device=self.spec.config.device,
            suspend_s=self.spec.config.policy.suspend_s,
            slab_count=self.spec.slab_count,
            has_backup=self.spec.backup is not None,
            figures=SelfReport(self.spec, self.engine, self._mapper, self.far).figures,
        )
        self.finder.start(self.spec, self._mapper.known_donors, self.make_link)
        self._loop("mapper", self._run_mapper())
        for name, work in watches(self.spec.config.device.transport, self.engine, self.blocking):
            self._loop(name, work)

    def make_link(self, donor: HostPort) -> DonorLink:
        """A link to one more donor."""
        assert self._link_config is not None
        return DonorLink(donor, self.engine, self.mapper, self._link_config, self._executor)

    async def _run_mapper(self) -> None:
        while True:
            try:
                await self.mapper.run()
            except Exception:
                # The page path does not need us; a bug here must not take swap space down.
                log.exception("the mapper failed; it is started again")
                await asyncio.sleep(1.0)

    async def map_everything(self) -> None:
        """Maps every slab: without a backup a page has nowhere else to go.

        Raises:
            MemoryLimitError: the donors cannot take all of them.
        """
        # Before is_eager, as two must not place one slab.
        for slab in range(self.spec.slab_count):
            if not await self.mapper.placer.place(slab):
                raise MemoryLimitError(
                    f"the donors can take {slab} of {counted(self.spec.slab_count, 'slab')}, and "
                    "without a backup all of them need a donor",
                    mend="Use a smaller --size, more donors, or a backup.",
                )
        self.mapper.is_eager = True

    # ------------------------------------------------------------------- loops beside

    def start_repairs(self, attachment: Attachment) -> None:
        """The loops that keep the kernel's side attached, and watch who else uses it."""
        repairs = Repairs(attachment.kernel, self.holder, self.mapper.events, self.blocking)
        self._loop("repair", repairs.run())
        taken_away = TakenAway(attachment, self.mapper.alarms, self.blocking)
        self._loop("taken away", taken_away.run(self.stop_lock, lambda: self.state == "serving"))

    def take_far_over(self, kept: dict[str, int]) -> None:
        """The loop that takes far memory over, after the block device. `kept`: see take_kept."""
        self._loop("far memory", self.far.take_over(self.engine, kept, self.mapper.alarms))

    def start_waker(self) -> None:
        """The loop that keeps processors awake while pages come in."""
        engine = self.engine
        self.keep_awake = KeepAwake(
            lambda: engine.pages_moved()[0],
            self.spec.config.device.keep_awake,
            rests=lambda: self.mapper.rests,
        )
        self.mapper.events.on_use.append(self.keep_awake.used)
        self._loop("keep-awake", self.keep_awake.run())

    def start_tending(self) -> None:
        """The loop that gets the engine another key in time."""
        if self.key.fd >= 0:
            self._loop("key", tend_key(self.engine, self.key))

    def _loop(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._loops.add(asyncio.create_task(work, name=name))

    def make_safe(self) -> None:
        """Locks memory and so on; notes what this host refuses. Blocking."""
        self.degraded = sentences(make_swap_safe())

    def start_certificate(self, renewed: Callable[[], Awaitable[None]]) -> None:
        """The loop that looks for a renewed certificate; `renewed` is called after a change."""
        if self.shown.has_certificate:
            self._loop("certificate", tend_certificate(self.shown, self.blocking, renewed))

    def use_client(self) -> None:
        """Sessions that are opened from now on show what `shown` has now. Those with donors whose
        authority was removed end: their pages are used on, and they get no further ones."""
        assert self._link_config is not None
        self._link_config = dataclasses.replace(self._link_config, client=self.shown.client)
        for link in self.mapper.known_donors.links:
            link.connections.config = self._link_config
            if (credentials := self.shown.client.credentials) is not None:
                link.session.end_unless_trusted(credentials.trusted)

    def retune(self, spec: DeviceSpec, *, has_other_keys: bool = False) -> None:
        """Puts the values of a spec in force, and keeps it where others read it. `has_other_keys`:
        `shown` has changed."""
        assert self._link_config is not None
        assert self.attachment is not None
        device, policy, mapper = spec.config.device, spec.config.policy, self.mapper
        self.spec = spec
        mapper.tune(policy, _refill_pages_per_s(spec))
        self._link_config = dataclasses.replace(
            self._link_config, device=device, suspend_s=policy.suspend_s
        )
        self.use_client()
        if self.keep_awake is not None:
            self.keep_awake.set_mode(device.keep_awake)
        self.finder.tell(spec, mapper.known_donors, self.make_link, has_other_keys=has_other_keys)
        rundir.write_record(self.paths.record, spec)
        self.keep_spec()

    def keep_spec(self) -> None:
        """Keeps spec and credentials as they are now, for a successor."""
        assert self.attachment is not None
        self.succession.keep_spec(self.spec, self.attachment, self.shown.kept())

    # ---------------------------------------------------------------------------- end

    async def end(self, runs: Runs, *, keep: bool, remove: bool) -> InfiniswapError | None:
        """Ends what is left when the front end has gone.

        Args:
            runs: what uses the device.
            keep: save the contents.
            remove: delete them.

        Returns:
            Why the contents could not be kept or deleted.
        """
        failure: InfiniswapError | None = None
        if keep:
            try:
                await self.blocking(lambda: contents.save(self.engine, self.paths, self.spec))
            except InfiniswapError as error:
                log.error("the contents could not be kept: %s", error, extra=_NOT_KEPT)
                failure = error
        await self._close()
        failure = self._forget_key() or failure
        if remove:
            try:
                contents.delete(self.paths, self.spec)
            except InfiniswapError as error:
                failure = error
        await runs.close()
        rundir.clear(self.paths)
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
        return failure

    def _forget_key(self) -> InfiniswapError | None:
        """After the engine's end, and when no standby can take over."""
        try:
            self.key.forget()
        except InfiniswapError as error:
            log.error("the device's key could not be overwritten: %s", error)
            return error
        self.holder.drop(KEY)
        return None

    async def _close(self) -> None:
        await self.finder.close()
        for task in self._loops:
            task.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        self._loops.clear()
        await self.far.close()
        engine, mapper = self._engine, self._mapper
        if mapper is not None and engine is not None:
            # Drains are still reported while the links give their slabs back.
            loop = asyncio.get_running_loop()
            loop.add_reader(engine.eventfd, mapper.events.take)
            await asyncio.gather(*(link.close() for link in mapper.known_donors.links))
            loop.remove_reader(engine.eventfd)
        if engine is not None:
            await self.blocking(engine.close)
            self._engine = None


def _new_engine(spec: DeviceSpec, state_fd: int, seal_key_fd: int, *, standby: bool) -> Engine:
    from infiniswap.engine.native import NativeEngine

    for transport in allowed(spec.config.device.transport):
        transport.preload()
    config = _engine_config(spec, state_fd, seal_key_fd, standby=standby)
    return NativeEngine(config, None if standby else spec.backup)


def _engine_config(
    spec: DeviceSpec, state_fd: int, seal_key_fd: int, *, standby: bool
) -> EngineConfig:
    device = spec.config.device
    return EngineConfig(
        size_bytes=spec.engine_bytes,
        slab_bytes=device.slab_bytes,
        staging_pages=device.staging_bytes // PAGE_BYTES,
        request_bytes_max=device.request_bytes,
        requests_max=device.requests_max,
        backup_write_bytes_max=device.backup_write_bytes,
        backup_writers=device.backup_writers,
        backup_readers=device.backup_readers,
        hedge_us_min=device.hedge_ms * 1000,
        far_bytes=spec.engine_bytes - spec.size_bytes,
        no_backup=spec.backup is None,
        state_fd=state_fd,
        seal_key_fd=seal_key_fd,
        standby=standby,
    )


def make_mapper(spec: DeviceSpec, engine: Engine, now_s: float) -> SlabMapper:
    """The mapper of a device, without links."""
    slab_pages = spec.config.device.slab_bytes // PAGE_BYTES
    mapper = SlabMapper(
        engine,
        spec.slab_count,
        spec.config.policy,
        random.Random(),
        now_s,
        Refill(_refill_pages_per_s(spec), now_s),
        slab_pages,
        # A device that outlives its jobs binds late: swap space is mostly idle (docs/adr/0030).
        _ahead(spec, slab_pages) if spec.ephemeral and spec.backup else (),
    )
    mapper.events.backup = spec.backup or ""
    return mapper


def _ahead(spec: DeviceSpec, slab_pages: int) -> list[MapAhead]:
    """Of the swap area, and of far memory: each is written to from its beginning on."""
    ranges = (spec.swap_slabs, spec.slab_count - spec.swap_slabs)
    return [MapAhead(slabs, slab_pages) for slabs in ranges if slabs]


def _refill_pages_per_s(spec: DeviceSpec) -> float:
    return 0.0 if spec.backup is None else spec.config.device.refill_pages_per_s
