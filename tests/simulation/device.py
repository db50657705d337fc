# SPDX-License-Identifier: Apache-2.0
"""A simulated device: the compiled engine, the mapper and the links, and a program that pages."""

from __future__ import annotations

import asyncio
import functools
import select
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from support.devices.stepped_engine import SimDone, lib

from infiniswap.config import DeviceConfig, PolicyConfig
from infiniswap.control import messages as m
from infiniswap.control.client import ClientConfig, Identity
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.engine.native_seal import NativeSealKeys
from infiniswap.engine.protocol import EngineConfig
from infiniswap.policy.ahead import MapAhead
from infiniswap.policy.refill import Refill
from infiniswap.units import PAGE_BYTES
from simulation.donor import KEYS
from simulation.engine import Connection, CoupledEngine
from simulation.loop import Host
from simulation.model import Pages, Version, page_bytes
from simulation.store import SLAB_BYTES, SLAB_PAGES

if TYPE_CHECKING:
    from simulation.world import World

REQUEST_PAGES_MAX = 8
REQUESTS_MAX = 12
REQUEST_S = 1.0
SUSPEND_S = 1.0
TENANTS = ("", "a", "b")

_GOOD = (
    lib.ISW_STEP_REMOTE_APPLY,
    lib.ISW_STEP_REMOTE_REPLY,
    lib.ISW_STEP_REMOTE_REPLY,
    lib.ISW_STEP_REMOTE_REPLY,
    lib.ISW_STEP_REMOTE_SLOW,
)
_BAD = (lib.ISW_STEP_REMOTE_FAIL, lib.ISW_STEP_REMOTE_TEAR, lib.ISW_STEP_REMOTE_DOWN)
_WRITES = (lib.ISW_SIM_WRITE, lib.ISW_SIM_TRIM, lib.ISW_SIM_ZERO)


@functools.cache
def seal_key() -> int:
    """A key of all simulated devices that seal their pages: every second one."""
    return NativeSealKeys().make()


class Link(DonorLink):
    """Hashed by its donor's name: the order of sets must not depend on addresses."""

    def __hash__(self) -> int:
        return sum(self.address.host.encode())


@dataclass(slots=True)
class Request:
    """One that the engine has not answered."""

    op: int
    page: int
    pages: int
    submitted: float
    versions: list[Version] = field(default_factory=list)
    disk_failed: bool = False


class SimDevice:
    """One device's process.

    Args:
        world: that it is in.
        rng: what happens.
        number: names it.
        slabs: its size; the last slab is cut short.
        has_backup: otherwise every slab is kept mapped, and pages are lost with their donors.
        ahead_share: of all devices with a backup, those that map ahead.
        tenant: on whose account; None: drawn from the seed.
    """

    def __init__(
        self,
        world: World,
        rng: Random,
        number: int,
        slabs: int,
        has_backup: bool,
        ahead_share: float = 0.5,
        tenant: str | None = None,
    ) -> None:
        self.name = f"device{number}"
        self.host: Host = world.loop.host(self.name)
        self.slabs = slabs
        self.has_backup = has_backup
        if tenant is None:
            tenant = TENANTS[(world.seed // 2 + number) % len(TENANTS)]
        self.use = m.LeaseUse(tenant=tenant)
        self.threads_frozen = False
        """Its C threads stand still."""
        self.faults = True
        self.disk_fails = False
        self.disk_failed = False
        self.requests: dict[int, Request] = {}
        self.reads = 0
        self._world = world
        self._loop, self._network = world.loop, world.network
        self._rng = rng
        self._number = number
        self._values = 0
        self._clock = 0
        self.pages = Pages(slabs * SLAB_PAGES - 3)
        self.engine = CoupledEngine(
            self.name,
            EngineConfig(
                size_bytes=self.pages.count * PAGE_BYTES,
                slab_bytes=SLAB_BYTES,
                staging_pages=64,
                request_bytes_max=REQUEST_PAGES_MAX * PAGE_BYTES,
                requests_max=REQUESTS_MAX,
                remotes_max=8,
                backup_write_bytes_max=4 * PAGE_BYTES,
                hedge_us_min=rng.choice((0, 1)),
                no_backup=not has_backup,
                read_ahead=rng.random() < 0.5,
                quicker=rng.random() < 0.5,
                seal_key_fd=seal_key() if (world.seed + number) % 2 else -1,
            ),
            lambda config: world.dial(self, config),
            self._broken,
        )
        self._fd = self.engine.eventfd
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        http = self._network.client(self.host)
        client = ClientConfig(keys=KEYS, connect_s=1.0, renew_s=4.0, send_s=2.0, http=http)
        self._config = LinkConfig(
            identity=Identity(
                f"00000000-0000-0000-0000-{number:012x}", self.name, self.name, self.use
            ),
            client=client,
            device=DeviceConfig(
                transport="tcp",
                slab_bytes=SLAB_BYTES,
                queues=rng.choice((1, 2)),
                connect_ms=1000,
                request_ms=round(REQUEST_S * 1000),
            ),
            suspend_s=SUSPEND_S,
            slab_count=slabs,
            has_backup=has_backup,
        )
        maps_ahead = has_backup and rng.random() < ahead_share
        self.host.run(self._start, maps_ahead)

    def _start(self, maps_ahead: bool) -> None:
        self.mapper = SlabMapper(
            self.engine,
            self.slabs,
            PolicyConfig(activity_alpha=0.5, period_s=0.5, hot_pages_per_s=2.0),
            Random(self._rng.getrandbits(64)),
            self._loop.time(),
            Refill(self._rng.choice((0.0, 500.0)) if self.has_backup else 0.0, self._loop.time()),
            SLAB_PAGES,
            [MapAhead(self.slabs, SLAB_PAGES)] if maps_ahead else (),
        )
        self.mapper.is_eager = not self.has_backup
        executor: Any = None
        self.mapper.known_donors.links = [
            Link(donor.address, self.engine, self.mapper, self._config, executor)
            for donor in self._world.donors
        ]
        self._task = self._loop.create_task(self.mapper.run(), name="mapper")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: Any) -> None:
        if not task.cancelled():
            self._world.failed(f"{self.name}: the mapper ended: {task.exception()!r}")

    async def close(self) -> None:
        """As DeviceService does it."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self._loop.add_reader(self._fd, self.mapper.events.take)
        await asyncio.gather(*(link.close() for link in self.mapper.known_donors.links))
        self._loop.remove_reader(self._fd)

    def kill(self) -> None:
        """No more of it, from one moment to the next. The engine can still be looked at."""
        if self.host.dead:
            return
        for link in self.mapper.known_donors.links:
            link.connections.is_closing = True  # or a recovery that is cancelled begins anew
        self._network.host_died(self.host, False)
        self.disconnect()
        self._loop.kill(self.host)
        self.disconnect()  # what a thread has connected meanwhile
        self.requests.clear()

    def disconnect(self) -> None:
        """As the end of the process does it."""
        for connection in self.engine.live():
            self.remote_step(lib.ISW_STEP_REMOTE_DOWN, connection)
        self.settle_events()

    # -------------------------------------------------------------------- requests

    def submit(self) -> None:
        rng = self._rng
        if len(self.requests) >= REQUESTS_MAX:
            return
        op = rng.choice(
            (lib.ISW_SIM_READ,) * 8
            + (lib.ISW_SIM_WRITE,) * 8
            + (lib.ISW_SIM_TRIM, lib.ISW_SIM_ZERO, lib.ISW_SIM_FLUSH)
        )
        page = rng.randrange(self.pages.count)
        pages = min(rng.choice((1, 1, 2, REQUEST_PAGES_MAX)), self.pages.count - page)
        self.request(op, page, 0 if op == lib.ISW_SIM_FLUSH else pages)

    def request(self, op: int, page: int, pages: int) -> None:
        self._clock += 1
        request = Request(op, page, pages, self._clock)
        data = b""
        if op in _WRITES:
            if op == lib.ISW_SIM_WRITE:
                self._values += 1
            value = self._number << 32 | self._values if op == lib.ISW_SIM_WRITE else 0
            data = page_bytes(value) * pages
            request.versions = [
                self.pages.written(page + i, value, self._clock) for i in range(pages)
            ]
        flags = 0
        if self._number % 2 and self._rng.random() < 0.3:
            flags = lib.ISW_SIM_PLUG
        number = self.engine.submit(op | flags, page * PAGE_BYTES, pages * PAGE_BYTES, data or None)
        self.requests[number] = request
        self.settle_events()

    def settle_events(self) -> None:
        """Takes what is done, and tells the loop when the engine has events."""
        while (done := self.engine.reap()) is not None:
            self._done(done)
        if self._poll.poll(0):
            self._loop.readable(self._fd)

    def _done(self, done: SimDone) -> None:
        self._clock += 1
        request = self.requests.pop(done.id, None)
        if request is None:
            self._world.failed(f"{self.name}: request {done.id} was answered twice")
            return
        self._loop.note(f"{self.name}: {request.op} {request.page} {done.error}")
        if done.error:
            is_borne = request.disk_failed if request.op == lib.ISW_SIM_READ else self.disk_failed
            is_borne |= not self.has_backup
            if not is_borne:
                self._world.failed(f"{self.name}: {request} failed ({done.error}) with a backup")
            return
        for version in request.versions:
            version.completed = self._clock
        if request.op == lib.ISW_SIM_READ:
            self.reads += request.pages
            wrong = self.pages.wrong(request.page, done.data, request.submitted)
            if wrong:
                self._world.failed(f"{self.name}: {wrong}")

    # ----------------------------------------------------------------------- steps

    def step(self) -> None:
        """One step of the engine, its disk or its connections."""
        rng = self._rng
        connections = self.engine.live()
        kind = rng.randrange(3 + 2 * len(connections))
        if kind < 3:
            self._disk_step(kind)
        else:
            self._remote_step(connections[(kind - 3) // 2])
        self.settle_events()

    def _disk_step(self, kind: int) -> None:
        if kind == 0:
            self.engine.step(lib.ISW_STEP_BACKUP_TAKE, self._rng.randrange(2))
        elif kind == 1:
            failing = self.disk_fails and self._rng.random() < 0.3
            self.disk_failed |= failing
            if failing:  # whose it is nobody here can tell
                for request in self.requests.values():
                    request.disk_failed = True
            step = lib.ISW_STEP_BACKUP_FAIL if failing else lib.ISW_STEP_BACKUP_DONE
            self.engine.step(step, 0, self._rng.randrange(16))
        else:
            self.engine.step(self._rng.choice((lib.ISW_STEP_UNPLUG, lib.ISW_STEP_BACKUP_RETRY)))

    def _remote_step(self, connection: Connection) -> None:
        rng, remote = self._rng, connection.remote
        n = rng.randrange(64)
        if self._world.is_stalled(self, connection):
            self._wait_for(connection)
            return
        connection.stalled_s = None
        if connection.is_broken:
            if not connection.is_closed and rng.random() < 0.2:
                self.engine.step(lib.ISW_STEP_REMOTE_LATE, remote, n)
            return
        if connection.is_closed:
            step = rng.choice((lib.ISW_STEP_REMOTE_REPLY, lib.ISW_STEP_REMOTE_DOWN))
        elif self.faults and rng.random() < 0.002:
            step = rng.choice(_BAD)
        elif rng.random() < 0.01:
            # Of the connection before this one: there are none if the donor has closed it.
            step = lib.ISW_STEP_REMOTE_LATE
        else:
            step = rng.choice(_GOOD)
        self.remote_step(step, connection, n)

    def remote_step(self, step: int, connection: Connection, n: int = 0) -> None:
        did = self.engine.step(step, connection.remote, n)
        if did and step in (lib.ISW_STEP_REMOTE_DOWN, lib.ISW_STEP_REMOTE_TEAR):
            self.engine.remote_broken(connection.remote)

    def _wait_for(self, connection: Connection) -> None:
        """Nothing arrives; requests have a deadline all the same."""
        if connection.is_broken or not self.engine.pending(connection.remote):
            connection.stalled_s = None
        elif connection.stalled_s is None:
            connection.stalled_s = self._loop.now_s
        elif self._loop.now_s - connection.stalled_s > REQUEST_S:
            self.remote_step(lib.ISW_STEP_REMOTE_DOWN, connection)
        elif self._rng.random() < 0.1:
            self.engine.step(lib.ISW_STEP_REMOTE_SLOW, connection.remote, self._rng.randrange(64))

    def _broken(self, connection: Connection) -> None:
        """The donor notices, when its threads get to it."""
        delay_s = self._rng.choice((0.0, 0.001, 0.01, 1.0))
        self._loop.world.run(self._loop.call_later, delay_s, self._notice, connection)

    def _notice(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        if self._world.is_stalled(self, connection):
            self._loop.world.run(self._loop.call_later, 0.3, self._notice, connection)
        else:
            connection.gone()
