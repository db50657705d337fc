# SPDX-License-Identifier: Apache-2.0
"""A running donor: puts store, pool, leases and control API together, and takes them apart.

Start: figures, the home of slabs and records (infiniswap.donor.home), store, data port, control
port. Stop: goodbye to every session, a bounded wait for consumers to leave the data port, then
everything is closed and the memory returned. A consumer loses nothing by a stop: its backup has
every page.

With slabs lent and a home to keep them a stop is a restart: consumers are told so, connections are
cut, and everything stays where it is for the successor. A daemon that is killed leaves the same.
Where no successor comes within the grace period of leases, what waits for the end of the daemon
(infiniswap.donor.releaser) gives the memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infiniswap import __version__, events
from infiniswap.config import Config
from infiniswap.control import messages as m
from infiniswap.control.channel import Limits
from infiniswap.control.handshake_rate import PER_HOST
from infiniswap.control.key_ring import KeyRing
from infiniswap.control.listening import bound_to
from infiniswap.control.local import LocalPort, local_path
from infiniswap.control.own_certificate import DONOR, certificate_path, own_certificate
from infiniswap.control.places import PROOF_S
from infiniswap.control.rate import Rate
from infiniswap.control.server import ControlServer
from infiniswap.control.service import ServerConfig
from infiniswap.control.tls import ServerTls
from infiniswap.donor.cluster_keys import donor_keys, second_keys
from infiniswap.donor.credentials import DonorCredentials, donor_credentials
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.home import Home, NoHome, Release, make_run_dir, open_home
from infiniswap.donor.identity import DonorIdentity, make_identity
from infiniswap.donor.memory import MemorySource
from infiniswap.donor.page import make_page
from infiniswap.donor.pool_limits import pool_limits, pool_note
from infiniswap.donor.reload import Reloader
from infiniswap.donor.service import DonorService
from infiniswap.engine.protocol import OffLoop
from infiniswap.engine.store import Store, StoreConfig
from infiniswap.errors import ConflictError, EngineError, InfiniswapError, SystemCallError
from infiniswap.policy.headroom import HeadroomConfig, HeadroomPolicy
from infiniswap.rights import DONOR_USER
from infiniswap.secret import check_listen_secret, host_secret_path
from infiniswap.system.clock import SteadyClock
from infiniswap.system.keep_awake import KeepAwake
from infiniswap.system.pressure import PressureTrigger
from infiniswap.system.process import be_nice
from infiniswap.system.surroundings.in_force import of_process
from infiniswap.units import PAGE_BYTES, HostPort, counted, format_size, format_size_short

log = logging.getLogger(__name__)

StoreFactory = Callable[[StoreConfig], Store]

STOP_S = 5.0
"""How long a stop waits for consumers to leave the data port."""

_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a running daemon."""

    control_port: int
    data_port: int


class Donor:
    """A running donor; see `serve`.

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
        """One of the daemon's own loops ended, which without being cancelled is a fault."""
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
    request_s: float = 5.0,
    proof_s: float = PROOF_S,
    tls_per_host: Rate = PER_HOST,
    clock: Callable[[], float] = time.monotonic,
    release: Release | None = None,
) -> AsyncIterator[Donor]:
    """Runs a donor for as long as the block lasts.

    Args:
        config: the configuration.
        store_factory: makes the slab pool.
        memory: figures.
        stop_s: how long stopping waits for consumers.
        request_s, proof_s, tls_per_host: see ServerConfig.
        clock: seconds; it should be monotonic.
        release: gives the home back; None: it stays until somebody asks for it.

    Raises:
        ConfigError: the configuration cannot work on this host.
        ConflictError: a port is in use.
        EngineError, SystemCallError: the store or a port cannot be set up.
    """
    check_listen_secret(config.daemon.listen, config.cluster.trust_file)
    credentials = await asyncio.to_thread(donor_credentials, config)
    if credentials is None:
        first = await asyncio.to_thread(donor_keys, config)
        keys = KeyRing(first, await asyncio.to_thread(second_keys, config), clock)
        tls, note = await asyncio.to_thread(own_certificate, config.daemon.state_dir, DONOR)
    else:
        keys, tls, note = KeyRing(None, None, clock), credentials.tls, ""
    control = replace(
        _server_config(config, tls, keys, stop_s),
        request_s=request_s,
        proof_s=proof_s,
        tls_per_host=tls_per_host,
    )
    async with contextlib.AsyncExitStack() as stack:
        steady = SteadyClock(clock)
        donor = await _start(
            stack, config, control, store_factory, memory, steady, credentials, release
        )
        if note:
            donor.service.degraded["certificate"] = [note]
        yield donor
    log.info("stopped")


async def _start(
    stack: contextlib.AsyncExitStack,
    config: Config,
    control: ServerConfig,
    store_factory: StoreFactory,
    memory: MemorySource,
    clock: SteadyClock,
    credentials: DonorCredentials | None,
    release: Release | None,
) -> Donor:
    """Starts each part, and leaves on the stack what stops it again, the last one first."""
    daemon = config.daemon
    executor = stack.enter_context(ThreadPoolExecutor(_WORKERS, "donor"))
    background = stack.enter_context(ThreadPoolExecutor(1, "spare", be_nice))
    in_executor = asyncio.get_running_loop().run_in_executor

    def off_loop(call: Callable[[], Any]) -> Any:
        return in_executor(executor, call)

    figures = await off_loop(memory.read)
    limits = pool_limits(config, figures)
    identity = make_identity(daemon.name, daemon.listen)
    home = await off_loop(lambda: _open_home(config, limits, identity))
    if isinstance(home, Home):
        identity = replace(identity, incarnation=home.incarnation)
    store = await stack.enter_async_context(
        _open_store(store_factory, config, limits, home, off_loop, release)
    )
    policy, period_s = HeadroomPolicy(limits), config.policy.period_s
    harvester = Harvester(store, policy, memory, executor, clock, period_s, background)
    clock.counters = harvester.counters
    service = DonorService(
        identity,
        config,
        store,
        harvester,
        executor,
        clock,
        records=home.records if isinstance(home, Home) else None,
        keys=control.keys,
    )
    harvester.evict = service.evict_some
    _restore(service, store, home, clock())
    server = ControlServer(service, control)
    service.server_counters = server.counters
    page = await make_page(service, server, control.keys, credentials)
    server.add_page(page)
    service.data_port = _listen_data(store, daemon.listen.host, daemon.data_port)
    service.control_port = await server.start(daemon.listen)
    stack.push_async_callback(_say_goodbye, server, service, home, control.stop_s)
    stack.push_async_callback(page.stop)
    await _serve_local(stack, config, service, server)
    _log_start(config, service, limits, server.sockets)
    _tell_what_stays(service)
    if note := pool_note(limits, figures):
        log.warning("%s", note)
    keep_awake = KeepAwake(lambda: store.stats()["read_bytes"] // PAGE_BYTES, daemon.keep_awake)
    reloader = Reloader(config, harvester, service, keep_awake, control.keys)
    if credentials is not None:
        service.degraded["credentials"] = credentials.degraded
        reloader.look_at_certificates = lambda: credentials.look(server, at_once=True)
    ports = Ports(service.control_port, service.data_port)
    donor = Donor(ports, service, server, harvester, reloader)
    stack.callback(_watch_pressure(harvester))
    await stack.enter_async_context(
        _loops(donor, config, control.keys, keep_awake, background, credentials)
    )
    # A donor that ends by a fault is started again, like one that gets a SIGTERM.
    stack.callback(lambda: _settle_end(home, service, donor.gives_back))
    return donor


async def _serve_local(
    stack: contextlib.AsyncExitStack, config: Config, service: DonorService, server: ControlServer
) -> None:
    """Where no secret is configured every user of this host may read the status, and no more."""
    if config.cluster.trust_file is not None or config.daemon.run_dir is None:
        return
    local = LocalPort(service, server.counters)
    try:
        make_run_dir(config.daemon.run_dir)
        listen = HostPort(config.daemon.listen.host, service.control_port)
        path = local_path(config.daemon.run_dir, listen)
        make_run_dir(path.parent, DONOR_USER)
        await local.start(path)
    except (InfiniswapError, OSError) as error:
        log.info("other users of this host cannot read the status: %s", error)
        return
    stack.push_async_callback(local.stop)


def _store_config(config: Config, limits: HeadroomConfig, slab_dir: Path | None) -> StoreConfig:
    daemon = config.daemon
    return StoreConfig(
        slab_bytes=daemon.slab_bytes,
        slabs_max=limits.slabs_max,
        leases_max=daemon.leases_max,
        connections_max=daemon.connections_max,
        connections_per_lease_max=daemon.connections_per_lease_max,
        connections_per_host_max=daemon.connections_per_host_max,
        slab_dir=None if slab_dir is None else str(slab_dir),
    )


def _server_config(config: Config, tls: ServerTls, keys: KeyRing, stop_s: float) -> ServerConfig:
    """Reads the token of the metrics."""
    cluster = config.cluster
    return ServerConfig(
        tls=tls,
        keys=keys,
        limits=Limits(heartbeat_s=cluster.heartbeat_s, missed_max=cluster.heartbeats_missed_max),
        connections_per_host_max=config.daemon.connections_per_host_max,
        stop_s=stop_s,
        metrics_token=config.metrics_token(),
    )


def _open_home(config: Config, limits: HeadroomConfig, identity: DonorIdentity) -> Home | NoHome:
    """Blocking. A home is entered, and has the incarnation to go by."""
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


@contextlib.asynccontextmanager
async def _open_store(
    factory: StoreFactory,
    config: Config,
    limits: HeadroomConfig,
    home: Home | NoHome,
    off_loop: OffLoop,
    release: Release | None,
) -> AsyncIterator[Store]:
    """The store; at the end it is closed, and its home left."""
    slab_dir = home.slabs if isinstance(home, Home) else None
    try:  # it takes long where many slabs are found
        store = await off_loop(lambda: factory(_store_config(config, limits, slab_dir)))
    except BaseException:
        if isinstance(home, Home):
            home.close()
        raise
    try:
        yield store
    finally:
        await off_loop(store.close)
        if isinstance(home, Home):
            await off_loop(lambda: home.leave(config.daemon.lease_grace_s, release))


def _restore(service: DonorService, store: Store, home: Home | NoHome, now_s: float) -> None:
    """Takes over from a predecessor: leases with their slabs, and whether the donor drains."""
    if isinstance(home, NoHome):
        sentence = f"a restart of the daemon loses what is lent: {home.reason}"
        log.log(
            logging.INFO if home.is_chosen else logging.WARNING,
            "%s",
            sentence,
            extra=events.about(events.RESTART_LOSES),
        )
        if not home.is_chosen:
            service.degraded["home"] = [sentence]
    else:
        for note in store.notes():
            log.warning("removed from %s: %s", home.slabs, note)
        service.written.restore(home.records.load(), store, now_s)
        if "noswap" in home.missing_options:
            sentence = (
                "this kernel (before 6.4) may swap slabs out while no daemon runs that has them "
                "locked"
            )
            service.degraded["home"] = [sentence]
            log.warning("%s", sentence, extra=events.about(events.RESTART_LOSES))
        _settle(home, service)
    service.drain.restore()


def _settle(home: Home | NoHome, service: DonorService, gives_back: bool = False) -> None:
    """Decides whether a stop leaves the slabs to a successor."""
    if isinstance(home, Home):
        home.keeps = not gives_back and bool(service.lent.mapped())


def _settle_end(home: Home | NoHome, service: DonorService, gives_back: bool) -> None:
    _settle(home, service, gives_back)
    service.sessions.leases_wait = isinstance(home, Home) and home.keeps


@contextlib.asynccontextmanager
async def _loops(
    donor: Donor,
    config: Config,
    keys: KeyRing,
    keep_awake: KeepAwake,
    background: Executor,
    credentials: DonorCredentials | None,
) -> AsyncIterator[None]:
    """The donor's own tasks, while the block lasts."""
    service = donor.service
    loops = {
        "harvest": donor.harvester.run(),
        "leases": service.expiry.run(config.policy.period_s),
        "keep-awake": keep_awake.run(),
        "drain": service.drain.run(),
    }
    if service.guard is not None:
        loops["service guard"] = service.guard.run()
    if credentials is not None:
        loops["certificate"] = credentials.run(donor.server)
    if config.cluster.discovery == "mqtt":
        # Late: a daemon with a list of peers has no use for it.
        from infiniswap.donor.announce import announce

        loops["announce"] = announce(config, service, keys)
    tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
    for task in tasks:
        task.add_done_callback(donor.task_done)
    tasks += [
        asyncio.create_task(donor.harvester.pool.pin_found(background), name="pin"),
        *(
            asyncio.create_task(transport.keep_ready(background), name=transport.name)
            for transport in service.transports
        ),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _watch_pressure(harvester: Harvester) -> Callable[[], None]:
    """Reads the memory figures at once when the kernel reports that programs wait for memory;
    returns what ends that. If the kernel reports nothing, the samples alone must suffice."""
    try:
        trigger = PressureTrigger()
    except InfiniswapError as error:
        log.info("the kernel does not report memory pressure to this daemon: %s", error)
        return lambda: None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(trigger.fileno())
        trigger.close()

    loop.add_reader(trigger.fileno(), harvester.nudge)
    return stop


async def _say_goodbye(
    server: ControlServer, service: DonorService, home: Home | NoHome, stop_s: float
) -> None:
    if isinstance(home, Home) and home.keeps:
        # Consumers go on without this donor for a moment; the sooner it is over the better.
        await server.stop(m.GOODBYE_RESTART, "the daemon is restarted")
        await service.work.finish()
        return
    await server.stop(m.GOODBYE_SHUTDOWN, "the daemon is stopping")
    end_s = time.monotonic() + stop_s
    left = service.store.stats()["connections"]
    while left and time.monotonic() < end_s:
        await asyncio.sleep(0.05)  # the store does not report the end of a connection
        left = service.store.stats()["connections"]
    if left:
        log.warning("cut: %s", counted(left, "data connection"))
    await service.work.finish()


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


def _tell_what_stays(service: DonorService) -> None:
    """Says what limits this process, and keeps it for the status."""
    service.degraded["starter"] = list(map(str, of_process(os.getpid())))
    for sentence in service.degraded["starter"]:
        log.warning("%s", sentence)


def _log_start(
    config: Config,
    service: DonorService,
    limits: HeadroomConfig,
    sockets: Sequence[socket.socket],
) -> None:
    log.info(
        "infiniswap %s lends up to %s in slabs of %s (headroom %s): control %s, pages %s",
        __version__,
        format_size_short(limits.slabs_max * limits.slab_bytes),
        format_size(limits.slab_bytes),
        format_size_short(limits.headroom_bytes),
        bound_to(sockets),
        bound_to(sockets, service.data_port),  # on the same addresses
    )
    if not config.daemon.listen.is_loopback:
        # The default, which asks for no action: devices seal pages, and say so where they do not.
        log.info(
            "data connections are plain TCP: whoever sees the packets can read them. "
            "That shows the pages of devices with seal = false: leave device.seal on",
            extra=events.about(events.PLAIN_TCP),
        )
    if config.cluster.certificate_file is not None:
        log.info(
            "peers have to show certificates; this host shows %s", config.cluster.certificate_file
        )
        return
    if config.cluster.secret_file is None:
        log.info(
            "no cluster secret is configured: users of this host who may read %s borrow memory",
            host_secret_path(config.daemon.state_dir),
        )
    log.info(
        "certificate for programs that check it: %s",
        certificate_path(config.daemon.state_dir, DONOR),
    )
