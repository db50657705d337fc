# SPDX-License-Identifier: Apache-2.0
"""A simulated donor: the daemon's own parts over a simulated store, network and memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from infiniswap.config import ClusterConfig, Config, DaemonConfig, PolicyConfig
from infiniswap.control import messages as m
from infiniswap.control.channel import Limits
from infiniswap.control.key_ring import KeyRing
from infiniswap.control.peer import Caller
from infiniswap.control.server import ControlServer
from infiniswap.control.service import ServerConfig
from infiniswap.control.tls import ServerTls
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.identity import DonorIdentity
from infiniswap.donor.leases import LeaseRecord
from infiniswap.donor.service import DonorService
from infiniswap.donor.service_guard import ServiceGuard
from infiniswap.errors import SystemCallError
from infiniswap.keys import derive
from infiniswap.policy.headroom import HeadroomConfig, HeadroomPolicy
from infiniswap.policy.slo import SloPolicy
from infiniswap.testing.memory import FakeMemory
from infiniswap.units import HostPort
from simulation.loop import Host, SimTask
from simulation.network import End, certificate_of
from simulation.store import PRETENDED_BYTES, SLAB_BYTES, Files, SimStore

if TYPE_CHECKING:
    from simulation.world import World

CONTROL_PORT = 9400
DATA_PORT = 9401
KEYS = derive(b"a secret of the simulated cluster")
HEARTBEAT_S = 0.5
MISSED_MAX = 5
GRACE_S = 4.0
SETTLE_S = 0.5
MOVE_S = 0.3


class SimRecords:
    """What a donor writes down; in its host's memory, as its slabs are. See LeaseRecords."""

    def __init__(self) -> None:
        self.leases: dict[int, LeaseRecord] = {}

    def save(self, record: LeaseRecord) -> None:
        self.leases[record.lease] = record

    def remove(self, lease: int) -> None:
        self.leases.pop(lease, None)


class SimLatency:
    """The latency of a service on a donor's host: its own, and a little for each slab that is
    lent. See infiniswap.donor.latency.Latency."""

    def __init__(self, donor: SimDonor) -> None:
        self._donor = donor

    async def read(self) -> float:
        """It may take long, and fail."""
        donor = self._donor
        await asyncio.sleep(donor.measure_s)
        if donor.measure_fails:
            raise SystemCallError("the service says nothing")
        return donor.service_latency + 0.02 * donor.store.stats()["slabs_mapped"]

    async def close(self) -> None:
        """Nothing is open."""


class SimDonor:
    """One donor's machine; its daemon can be crashed, stopped and started again.

    Args:
        world: that it is in.
        rng: what the donor itself draws.
        number: names it.
        slabs_max: of its pool.
        state_dir: for the wish to drain.
    """

    def __init__(
        self, world: World, rng: Random, number: int, slabs_max: int, state_dir: Path | None
    ) -> None:
        self.name = f"donor{number}"
        self.address = HostPort(self.name, CONTROL_PORT)
        self._donor_id = f"00000000-0000-0000-0001-{number:012x}"
        self.memory = FakeMemory((slabs_max + 6) * PRETENDED_BYTES)
        self.is_up = False
        self.is_silent = False
        """Down, and nobody tells those who ask."""
        self.threads_frozen = False
        """Its C threads stand still, too."""
        self.protects = rng.random() < 0.3
        """Whether a service of the host has a bound, of 1."""
        self.service_latency = 0.1
        self.measure_s = 0.001
        self.measure_fails = False
        self._world = world
        self._loop, self._network = world.loop, world.network
        self._rng = rng
        self._slabs_max = slabs_max
        self._state_dir = state_dir
        self._sessions: set[SimTask] = set()
        self._loops: list[SimTask] = []
        self._left: tuple[str, Files, SimRecords] | None = None
        self.start()

    # ------------------------------------------------------------------------ life

    def start(self) -> None:
        """A new daemon, unless there is one: the former one's successor if that has left its slabs,
        otherwise of another incarnation, with nothing lent."""
        if self.is_up:
            return
        new = f"{self._rng.getrandbits(128):032x}" if self._left is None else ""
        incarnation, files, records = self._left or (new, Files(), SimRecords())
        self._left = None
        self._incarnation, self._records = incarnation, records
        self.host: Host = self._loop.host(self.name)
        self.is_up, self.is_silent = True, False
        self._network.host_back(self.name)
        self.store = SimStore(self._world, self._slabs_max, self._rng, files)
        self.memory.store = self.store
        self.host.run(self._start)
        self._network.listen(str(self.address), self.host, self._serve)

    def _start(self) -> None:
        policy = HeadroomPolicy(
            HeadroomConfig(
                slab_bytes=PRETENDED_BYTES,
                headroom_bytes=4 * PRETENDED_BYTES,
                pool_bytes_max=self._slabs_max * PRETENDED_BYTES,
                hysteresis_bytes=PRETENDED_BYTES // 4,
                free_slabs_max=1,
            )
        )
        clock = self.host.time
        executor: Any = None
        harvester = Harvester(self.store, policy, self.memory, executor, clock)
        self.harvester = harvester
        self.service = DonorService(
            DonorIdentity(self._donor_id, self.name, self._incarnation),
            Config(
                daemon=DaemonConfig(
                    # Port 0: nothing is kept over restarts.
                    listen=HostPort(self.name, 0 if self._state_dir is None else CONTROL_PORT),
                    slab_bytes=SLAB_BYTES,
                    lease_grace_s=GRACE_S,
                    state_dir=self._state_dir or Path(),
                ),
                cluster=ClusterConfig(heartbeat_s=HEARTBEAT_S, heartbeats_missed_max=MISSED_MAX),
                policy=PolicyConfig(evict_slabs_max=4),
            ),
            self.store,
            harvester,
            executor,
            clock,
            Random(self._rng.getrandbits(64)),
            self._records,
        )
        kept = sorted(self._records.leases.values(), key=lambda record: record.lease)
        self.service.written.restore(kept, self.store, clock())
        limits = Limits(heartbeat_s=HEARTBEAT_S, missed_max=MISSED_MAX, send_s=2.0)
        tls = ServerTls(cast(Any, None), certificate_of(self.name))  # nothing listens on a port
        self.server = ControlServer(
            self.service,
            ServerConfig(tls, KeyRing(KEYS, None, clock), limits=limits, proof_s=2.0),
        )
        harvester.evict = self.service.evict_some
        loops = {}
        if self.protects:
            guard = ServiceGuard(
                *(SloPolicy(1.0, SETTLE_S), SimLatency(self), harvester, self.service.evictor),
                *(clock, self.service.counters, MOVE_S),
            )
            self.service.guard = guard
            loops["service guard"] = guard.run()
        self.service.drain.restore()
        self.service.data_port = DATA_PORT
        self.service.control_port = CONTROL_PORT
        self._loops = [
            self._loop.create_task(harvester.run(), name="harvest"),
            self._loop.create_task(self.service.expiry.run(1.0), name="leases"),
            self._loop.create_task(self.service.drain.run(), name="drain"),
            *(self._loop.create_task(loop, name=name) for name, loop in loops.items()),
        ]
        for task in self._loops:
            task.add_done_callback(self._loop_ended)

    def _loop_ended(self, task: Any) -> None:
        if not task.cancelled():
            self._world.failed(f"{self.name}: {task.get_name()} ended: {task.exception()!r}")

    async def _serve(self, end: End, address: str) -> None:
        task: Any = asyncio.current_task()
        self._sessions.add(task)
        try:
            await self.server.converse(end, Caller.at(address))  # type: ignore[arg-type]
        finally:
            self._sessions.discard(task)

    def crash(self, silently: bool, keeps: bool = False) -> None:
        """No more of it, from one moment to the next.

        keeps: its slabs and records are there for the next one.
        """
        if keeps:
            self._left = self._incarnation, self.store.files(), self._records
        self.is_up, self.is_silent = False, silently
        self._network.host_died(self.host, silently)
        if not silently:
            self._network.silence(str(self.address))
        self.store.close()
        self._sessions.clear()
        self._loop.kill(self.host)

    def stop(self, keeps: bool = False) -> SimTask:
        """As on SIGINT, or with `keeps` on SIGTERM; the task ends when the daemon has."""
        return self.host.spawn(self._stop(keeps), "stop")

    async def _stop(self, keeps: bool) -> None:
        for task in self._loops:
            task.cancel()
        await asyncio.wait(self._loops)
        self._network.silence(str(self.address))
        if keeps:
            await self.server.stop(m.GOODBYE_RESTART, "restarted")
        else:
            await self.server.stop()
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=5.0)
        await self.service.work.finish()
        if keeps and self.is_up:
            self._left = self._incarnation, self.store.files(), self._records
        self.store.close()
        self._loop.world.run(self._loop.call_soon, self._stopped)

    def _stopped(self) -> None:
        if self.is_up:
            self.is_up = False
            self._network.host_died(self.host, False)
            self._loop.kill(self.host)

    def set_draining(self, draining: bool) -> None:
        """As `infiniswap donor drain`."""
        self.host.spawn(self.service.set_draining(draining), "set draining")
