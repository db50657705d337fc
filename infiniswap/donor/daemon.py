# SPDX-License-Identifier: Apache-2.0
"""`infiniswap daemon`: puts store, pool, leases and control API together and runs them.

Start: figures, the home of slabs and records (infiniswap.donor.home), store, data port, control
port, then the ready file. Stop: goodbye to every session, a bounded wait for consumers to leave the
data port, then everything is closed and the memory returned. A consumer loses nothing by a stop:
its backup has every page.

SIGTERM with slabs lent and a home to keep them means a restart: consumers are told so, connections
are cut, and everything stays where it is for the successor. A daemon that is killed leaves the
same. Where no successor comes within the grace period of leases, `infiniswap daemon --release`,
which a stopping daemon leaves behind, gives the memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infiniswap import __version__, events
from infiniswap.config import Config, check_listen_secret
from infiniswap.control import messages as m
from infiniswap.control.channel import Limits
from infiniswap.control.server import CONNECTIONS_MAX, ControlServer, ServerConfig
from infiniswap.control.text import clean_name
from infiniswap.donor import descriptors
from infiniswap.donor.announce import announce
from infiniswap.donor.evict import EvictionConfig
from infiniswap.donor.harvest import Harvester, MemorySource
from infiniswap.donor.home import Home, NoHome, leave_release, open_home
from infiniswap.donor.pool_limits import pool_limits, pool_note
from infiniswap.donor.reload import Reloader
from infiniswap.donor.report import DonorIdentity
from infiniswap.donor.service import DonorService, ServiceConfig
from infiniswap.engine.protocol import Store, StoreConfig
from infiniswap.errors import (
    ConflictError,
    EngineError,
    InfiniswapError,
    SystemCallError,
    from_oserror,
)
from infiniswap.policy.headroom import HeadroomConfig, HeadroomPolicy
from infiniswap.system.clock import SteadyClock
from infiniswap.system.notify import Notifier
from infiniswap.system.pressure import PressureTrigger
from infiniswap.system.process import be_nice
from infiniswap.system.wakeful import Waker
from infiniswap.units import PAGE_BYTES, HostPort, format_size, format_size_short

log = logging.getLogger(__name__)

StoreFactory = Callable[[StoreConfig], Store]

STOP_S = 5.0
"""How long a stop waits for consumers to leave the data port."""

_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a running daemon serves."""

    control_port: int
    data_port: int


def make_identity(name: str, listen: HostPort) -> DonorIdentity:
    """Who this daemon is: the same over restarts on the same host, network and address."""
    host_name = socket.gethostname() or "unnamed"
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    network = 0
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    seed = f"infiniswap donor {machine} {host_name} {network} {listen}"
    donor_id = uuid.uuid5(uuid.NAMESPACE_OID, seed) if listen.port else uuid.uuid4()
    return DonorIdentity(
        str(donor_id), clean_name(name, clean_name(host_name, "unnamed")), secrets.token_hex(16)
    )


class Donor:
    """A donor: everything between start and stop. An async context manager's contents; see `serve`.

    Attributes:
        ports: where it serves.
        service: leases and status.
        server: the control API.
        harvester: the pool.
        reloader: changes what can change while it runs.
        gives_back: whether stopping returns the memory even where a successor could have it.
    """

    def __init__(
        self,
        ports: Ports,
        service: DonorService,
        server: ControlServer,
        harvester: Harvester,
        reloader: Reloader,
    ) -> None:
        self.ports = ports
        self.service = service
        self.server = server
        self.harvester = harvester
        self.reloader = reloader
        self.gives_back = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def task_done(self, task: asyncio.Task[None]) -> None:
        """One of the daemon's own loops ended: by itself only through a fault."""
        if not task.cancelled() and not self._failed.done():
            error = task.exception() or RuntimeError(f"{task.get_name()} ended")
            self._failed.set_exception(error)

    async def wait(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set; raises what ended one of the daemon's own loops."""
        stopped = asyncio.create_task(stop.wait(), name="stop signal")
        try:
            either: set[asyncio.Future[Any]] = {stopped, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                await self._failed
        finally:
            stopped.cancel()


@contextlib.asynccontextmanager
async def serve(
    config: Config,
    store_factory: StoreFactory,
    memory: MemorySource,
    *,
    stop_s: float = STOP_S,
    handshake_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Donor]:
    """Runs a donor for as long as the block lasts.

    Args:
        config: the configuration.
        store_factory: makes the slab pool.
        memory: figures.
        stop_s: how long stopping waits for consumers.
        handshake_s: see ServerConfig.
        clock: seconds; it should be monotonic.

    Raises:
        ConfigError: the configuration cannot work on this host.
        ConflictError: a port is in use.
        EngineError, SystemCallError: the store or a port cannot be set up.
    """
    daemon = config.daemon
    secret, token = config.secret(), config.metrics_token()
    check_listen_secret(daemon.listen, secret)
    steady = SteadyClock(clock)
    with (
        ThreadPoolExecutor(_WORKERS, "donor") as executor,
        ThreadPoolExecutor(1, "spare", be_nice) as background,
    ):
        loop = asyncio.get_running_loop()
        figures = await loop.run_in_executor(executor, memory.read)
        limits = pool_limits(config, figures)
        identity = make_identity(daemon.name, daemon.listen)
        home = await loop.run_in_executor(executor, lambda: _open_home(config, limits, identity))
        if isinstance(home, Home):
            identity = replace(identity, incarnation=home.incarnation)
        store = await loop.run_in_executor(
            executor, lambda: _make_store(store_factory, config, limits, home)
        )
        keeps = True  # what lies there, until it is known
        try:
            harvester = Harvester(
                store,
                HeadroomPolicy(limits),
                memory,
                executor,
                steady,
                config.policy.period_s,
                background,
            )
            steady.counters = harvester.counters
            service = DonorService(
                identity,
                _service_config(config, limits, secret is not None),
                store,
                harvester,
                executor,
                steady,
                records=home.records if isinstance(home, Home) else None,
            )
            _restore(service, store, home, steady())
            keeps = bool(service.mapped())
            server = ControlServer(
                service,
                replace(_server_config(config, secret, stop_s, handshake_s), metrics_token=token),
            )
            service.server_counters = server.counters
            harvester.evict = service.evict_some
            service.drain.restore()
            service.data_port = _listen_data(store, daemon.listen.host, daemon.data_port)
            service.control_port = await server.start(daemon.listen)
            ports = Ports(service.control_port, service.data_port)
            try:
                _log_start(config, ports, limits, secret is not None)
                if note := pool_note(limits, figures):
                    log.warning("%s", note)
                waker = Waker(lambda: store.stats()["read_bytes"] // PAGE_BYTES, daemon.keep_awake)
                reloader = Reloader(config, pool_limits, harvester, service, waker)
                donor = Donor(ports, service, server, harvester, reloader)
                stop_pressure = _watch_pressure(harvester)
                tasks: tuple[asyncio.Task[None], ...] = (
                    asyncio.create_task(harvester.run(), name="harvest"),
                    asyncio.create_task(service.watch(config.policy.period_s), name="leases"),
                    asyncio.create_task(waker.run(), name="waker"),
                    asyncio.create_task(service.drain.run(), name="drain"),
                )
                if config.cluster.discovery == "mqtt":
                    announcing = asyncio.create_task(
                        announce(config, service, secret), name="announce"
                    )
                    tasks = (*tasks, announcing)
                for task in tasks:
                    task.add_done_callback(donor.task_done)
                spare = (
                    asyncio.create_task(_pin(store, background), name="pin"),
                    asyncio.create_task(service.rdma.keep_registered(background), name="rdma"),
                )
                try:
                    yield donor
                finally:
                    # What ends by a fault is started again, as what gets a SIGTERM may be.
                    keeps = (
                        isinstance(home, Home) and not donor.gives_back and bool(service.mapped())
                    )
                    for task in (*tasks, *spare):
                        task.cancel()
                    await asyncio.wait((*tasks, *spare))
                    stop_pressure()
            finally:
                await _stop(server, service, store, stop_s, keeps)
        finally:
            await loop.run_in_executor(executor, store.close)
            if isinstance(home, Home):
                await loop.run_in_executor(executor, lambda: _leave(home, config, keeps))
    log.info("stopped")


async def run(
    config: Config,
    store_factory: StoreFactory,
    memory: MemorySource,
    ready_file: Path | None = None,
    load: Callable[[], Config] | None = None,
) -> None:
    """Runs a donor until SIGTERM (a successor may have what is lent) or SIGINT (it may not).

    Args:
        config: the configuration.
        store_factory: makes the slab pool.
        memory: figures.
        ready_file: gets the ports as JSON when everything is served; removed at the stop.
        load: reads the configuration anew, at SIGHUP; None: there is nothing to read.

    Raises:
        See serve.
    """
    descriptors.allow(config.daemon.connections_max + CONNECTIONS_MAX)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(descriptors.ShortageLog())
    stopped = asyncio.Event()
    numbers: list[int] = []

    def stop(number: int) -> None:
        numbers.append(number)
        stopped.set()

    hung_up = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        async with serve(config, store_factory, memory) as donor:
            if ready_file is not None:
                _write_ready(ready_file, donor.ports)
            notifier = Notifier()
            serving = f"serving on ports {donor.ports.control_port}, {donor.ports.data_port}"
            notifier.ready(serving)
            watchdog = asyncio.create_task(notifier.watchdog(), name="watchdog")
            reloading = asyncio.create_task(
                _reload(donor, load or (lambda: config), hung_up, notifier, serving), name="reload"
            )
            reloading.add_done_callback(donor.task_done)
            try:
                await donor.wait(stopped)
            finally:
                watchdog.cancel()
                reloading.cancel()
                notifier.stopping()
            donor.gives_back = signal.SIGINT in numbers
            log.info("stopping")
    finally:
        if ready_file is not None:
            _remove_ready(ready_file)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _reload(
    donor: Donor,
    load: Callable[[], Config],
    hung_up: asyncio.Event,
    notifier: Notifier,
    serving: str,
) -> None:
    """At each SIGHUP, until cancelled."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        notifier.reloading()
        outcome = await donor.reloader.reload(load)
        notifier.ready("; ".join([serving, *outcome.sentences("daemon")]))


def _open_home(config: Config, limits: HeadroomConfig, identity: DonorIdentity) -> Home | NoHome:
    """Blocking. Where there is one: entered, with the incarnation to go by."""
    if not config.daemon.listen.port:
        reason = "with a port of the system's choice it is another donor after a restart"
        return NoHome(reason, is_chosen=True)
    pool_bytes = limits.slabs_max * limits.slab_bytes
    home = open_home(config.daemon.run_dir, identity.donor_id, pool_bytes)
    if isinstance(home, Home):
        try:
            home.enter(identity.donor_id, limits.slab_bytes, identity.incarnation)
        except BaseException:
            home.close()
            raise
    return home


def _make_store(
    factory: StoreFactory, config: Config, limits: HeadroomConfig, home: Home | NoHome
) -> Store:
    """Blocking, where many slabs are found."""
    try:
        return factory(_store_config(config, limits, home))
    except BaseException:
        if isinstance(home, Home):
            home.close()
        raise


def _restore(service: DonorService, store: Store, home: Home | NoHome, now_s: float) -> None:
    if isinstance(home, NoHome):
        sentence = f"a restart of the daemon loses what is lent: {home.reason}"
        log.log(
            logging.INFO if home.is_chosen else logging.WARNING,
            "%s",
            sentence,
            extra=events.about(events.RESTART_LOSES),
        )
        if not home.is_chosen:
            service.degraded.append(sentence)
        return
    for note in store.notes():
        log.warning("removed from %s: %s", home.slabs, note)
    service.keeping.restore(home.records.load(), store, now_s)
    if "noswap" in home.missing_options:
        service.degraded.append(
            "this kernel (before 6.4) may swap slabs out while no daemon runs that has them locked"
        )
        log.warning("%s", service.degraded[-1], extra=events.about(events.RESTART_LOSES))


async def _pin(store: Store, executor: Executor) -> None:
    """What a predecessor has left is pinned beside serving it: consumers wait for that."""
    loop = asyncio.get_running_loop()
    try:
        while await loop.run_in_executor(executor, store.pin):
            pass
    except InfiniswapError as error:
        log.warning("%s", error)


def _leave(home: Home, config: Config, keeps: bool) -> None:
    """Blocking. The end of a daemon that has a home."""
    try:
        if not keeps:
            home.remove()
            return
        home.close()
        log.info(
            "what is lent stays in %s for a restarted daemon; `infiniswap daemon --release` gives "
            "it back, which happens by itself after %g s",
            home.path,
            config.daemon.lease_grace_s,
        )
        leave_release(home.path, config.daemon.lease_grace_s)
    except InfiniswapError as error:
        log.error("%s", error)


def _watch_pressure(harvester: Harvester) -> Callable[[], None]:
    """The kernel's own word when somebody waits for memory, beside the samples; returns what ends
    it. Where it gives none the samples alone have to do."""
    try:
        trigger = PressureTrigger()
    except InfiniswapError as error:
        log.debug("no word of memory pressure from the kernel: %s", error)
        return lambda: None
    loop = asyncio.get_running_loop()

    def fired() -> None:
        if trigger.take():
            harvester.nudge()

    def stop() -> None:
        loop.remove_reader(trigger.fileno())
        trigger.close()

    loop.add_reader(trigger.fileno(), fired)
    return stop


async def _stop(
    server: ControlServer, service: DonorService, store: Store, stop_s: float, keeps: bool
) -> None:
    if keeps:
        # Consumers go on without this donor for a moment; the sooner it is over the better.
        await server.stop(m.GOODBYE_RESTART, "the daemon is restarted")
        await service.finish()
        return
    await server.stop(m.GOODBYE_SHUTDOWN, "the daemon is stopping")
    end_s = time.monotonic() + stop_s
    left = store.stats()["connections"]
    while left and time.monotonic() < end_s:
        await asyncio.sleep(0.05)  # the store tells nobody when a connection ends
        left = store.stats()["connections"]
    if left:
        log.warning("%d data connections are cut", left)
    await service.finish()


def _store_config(config: Config, limits: HeadroomConfig, home: Home | NoHome) -> StoreConfig:
    daemon = config.daemon
    return StoreConfig(
        slab_bytes=daemon.slab_bytes,
        slabs_max=limits.slabs_max,
        leases_max=daemon.leases_max,
        connections_max=daemon.connections_max,
        connections_per_lease_max=daemon.connections_per_lease_max,
        connections_per_host_max=daemon.connections_per_host_max,
        slab_dir=str(home.slabs) if isinstance(home, Home) else None,
    )


def _service_config(config: Config, limits: HeadroomConfig, authenticated: bool) -> ServiceConfig:
    cluster = config.cluster
    return ServiceConfig(
        slab_bytes=limits.slab_bytes,
        pool_bytes=limits.slabs_max * limits.slab_bytes,
        grace_s=config.daemon.lease_grace_s,
        leases_max=config.daemon.leases_max,
        connections_per_host_max=config.daemon.connections_per_host_max,
        heartbeat_s=cluster.heartbeat_s,
        silence_s=cluster.heartbeat_s * cluster.heartbeats_missed_max,
        authenticated=authenticated,
        eviction=EvictionConfig(
            slabs_max=config.policy.evict_slabs_max,
            extra=config.policy.evict_extra_slabs,
            deadline_s=config.daemon.evict_deadline_s,
            move_s=config.daemon.evict_move_s,
        ),
        drain_move_s=config.daemon.drain_move_s,
        consumer_share_max=config.daemon.consumer_share_max,
        state_dir=config.daemon.state_dir,
        listen_port=config.daemon.listen.port,
        rdma=config.daemon.rdma == "auto",
    )


def _server_config(
    config: Config, secret: bytes | None, stop_s: float, handshake_s: float
) -> ServerConfig:
    cluster = config.cluster
    limits = Limits(heartbeat_s=cluster.heartbeat_s, missed_max=cluster.heartbeats_missed_max)
    return ServerConfig(
        secret=secret,
        limits=limits,
        handshake_s=handshake_s,
        connections_per_host_max=config.daemon.connections_per_host_max,
        stop_s=stop_s,
    )


def _listen_data(store: Store, host: str, port: int) -> int:
    try:
        return store.listen(host, port)
    except EngineError as error:
        if error.code == errno.EADDRINUSE:
            raise ConflictError(
                "the port is in use",
                where=f"data port {HostPort(host, port)}",
                mend="Another daemon may be running; see `infiniswap status`, or give another "
                "port with --data-port.",
            ) from error
        raise SystemCallError(
            error.what,
            where=f"data port {HostPort(host, port)}",
            mend="Give an address of this host and a port that this user may use.",
            code=error.code,
        ) from error


def _log_start(config: Config, ports: Ports, limits: HeadroomConfig, secret: bool) -> None:
    host = config.daemon.listen.host
    log.info(
        "infiniswap %s lends up to %s in slabs of %s (headroom %s): control %s, pages %s",
        __version__,
        format_size_short(limits.slabs_max * limits.slab_bytes),
        format_size(limits.slab_bytes),
        format_size_short(limits.headroom_bytes),
        HostPort(host, ports.control_port),
        HostPort(host, ports.data_port),
    )
    if not config.daemon.listen.is_loopback:
        log.warning(
            "plain TCP: lease tokens and pages can be read by whoever sees the packets between "
            "the hosts; use a network that you trust",
            extra=events.about(events.PLAIN_TCP),
        )
    if not secret:
        log.info("no cluster secret: any user of this host may borrow memory")


def _write_ready(path: Path, ports: Ports) -> None:
    text = json.dumps(
        {
            "control_port": ports.control_port,
            "data_port": ports.data_port,
            "pid": os.getpid(),
        }
    )
    try:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text + "\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        raise from_oserror("cannot write the ready file", error, where=str(path)) from error


def _remove_ready(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
