# SPDX-License-Identifier: Apache-2.0
"""One seed: a world of devices and donors, what happens in it, and what must hold."""

from __future__ import annotations

import errno
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from support.devices.stepped_engine import lib

from infiniswap.engine.protocol import RemoteConfig, SlabState
from infiniswap.errors import EngineError
from simulation.device import REQUEST_PAGES_MAX, SimDevice
from simulation.donor import SimDonor
from simulation.engine import Connection
from simulation.faults import Faults
from simulation.loop import _HOST, SimLoop
from simulation.network import FIGURES, Network
from simulation.store import SimStore, StoreLease

FAULTS_S = 12.0
CALM_S_MAX = 240.0
"""A donor given up for what it did is not asked for a minute or two."""
_LOOK_S = 0.25
"""A host at rest does something once a second: what is waited for is not noticed much later."""


class SimulationError(AssertionError):
    """An invariant does not hold; the seed is in the message."""


class _Watch(logging.Handler):
    """No part of the product may meet an exception that it did not expect."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.DEBUG)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        host = _HOST.get(None)
        if record.exc_info and record.exc_info[1] and not (host is not None and host.dead):
            error = record.exc_info[1]
            self._world.failed(f"logged: {record.getMessage()}: {_trace(error)}")
        self._world.say(f"{record.levelname} {record.getMessage()}")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class World:
    """A world drawn from a seed.

    Args:
        seed: of everything.
        state_dir: where donors keep the wish to drain; None: nowhere.
        is_loud: prints what happens.
    """

    def __init__(self, seed: int, state_dir: Path | None = None, is_loud: bool = False) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.problems: list[str] = []
        self.stalled_pairs: set[tuple[str, str]] = set()
        self.pages_migrated = 0
        self._is_loud = is_loud
        self._engine_share = 0.0
        self._gone: list[SimDevice] = []
        self.loop = SimLoop(self.new_rng(), self._loop_failed)  # type: ignore[abstract]
        self.network = Network(self.loop, self.new_rng())
        self.donors: list[SimDonor] = []
        self.devices: list[SimDevice] = []
        self._state_dir = state_dir
        self.faults = Faults(self)

    def new_rng(self) -> Random:
        return Random(self.rng.getrandbits(64))

    def say(self, text: str) -> None:
        if self._is_loud:
            host = _HOST.get(self.loop.world)
            print(f"{self.loop.now_s:9.3f} {host.name:8} {text}", file=sys.stderr)

    def failed(self, what: str) -> None:
        self.say(f"FAILED {what}")
        self.problems.append(what)

    def _loop_failed(self, message: str, error: BaseException | None) -> None:
        self.failed(f"{message}{': ' + _trace(error) if error else ''}")

    def _check(self) -> None:
        if self.problems:
            raise SimulationError(
                f"seed {self.seed}, {self.loop.now_s - 1000.0:.3f} s: {self.problems[0]}"
            )

    # ---------------------------------------------------------------------- making

    def _build(self) -> None:
        rng = self.rng
        slabs = rng.randrange(3, 7)
        self.network.duplicate_share = rng.choice((0.0, 0.0, 0.02, 0.2))
        self.network.delay_s_max = rng.choice((0.0005, 0.005, 0.05))
        # Fewer steps of the engine per message: more requests are under way when one arrives.
        self._engine_share = rng.choice((0.03, 0.15))
        devices = rng.choice((1, 2))
        # Two devices are those of one host, or of two.
        self.network.one_address = "host" if self.seed % 2 else ""
        has_backup = rng.random() < 0.8
        for number in range(rng.choice((2, 3))):
            directory = None
            if self._state_dir is not None:
                directory = self._state_dir / f"{self.seed}-{number}"
            rng_of_donor = self.new_rng()
            slabs_max = rng.randrange(3 if has_backup else slabs * devices, slabs * devices + 2)
            self.donors.append(SimDonor(self, rng_of_donor, number, slabs_max, directory))
        for number in range(1, devices + 1):
            self.devices.append(SimDevice(self, self.new_rng(), number, slabs, has_backup))

    def replace_device(self, number: int) -> None:
        """A device's process is killed, and started again with nothing of before."""
        old = self.devices[number]
        old.kill()
        self._gone.append(old)
        rng = self.new_rng()
        self.devices[number] = SimDevice(self, rng, number + 1, old.slabs, old.has_backup)

    def _donor_of(self, name: str) -> SimDonor:
        name = name.removeprefix(FIGURES)
        return next(donor for donor in self.donors if donor.name == name)

    def dial(self, device: SimDevice, config: RemoteConfig) -> SimStore:
        """The store that answers at an address."""
        donor = self._donor_of(config.host)
        if self._is_parted(device, donor):
            raise EngineError("no answer", code=errno.ETIMEDOUT)
        if not donor.is_up:
            raise EngineError("connection refused", code=errno.ECONNREFUSED)
        return donor.store

    def _is_parted(self, device: SimDevice, donor: SimDonor) -> bool:
        return (
            donor.is_silent
            or donor.threads_frozen
            or (device.name, donor.name) in self.stalled_pairs
            or self.network.is_cut(device.host, donor.host)
        )

    def is_stalled(self, device: SimDevice, connection: Connection) -> bool:
        return self._is_parted(device, self._donor_of(connection.donor))

    # -------------------------------------------------------------------- checking

    def _users(self, lease: StoreLease, slot: int) -> list[tuple[SimDevice, int, int, int]]:
        """The slabs that engines have in a slot, however far that is from the truth: number,
        generation, requests in flight there. One that migrates is in two."""
        return [
            (device, number, generation, in_flight)
            for device in self.devices
            for connection in device.engine.live()
            if connection.lease is lease
            for number, info in enumerate(device.engine.slabs())
            for state, remote, at, generation, in_flight in (
                (info.state, info.remote, info.slot, info.generation, info.in_flight),
                (
                    info.source_state,
                    info.source_remote,
                    info.source_slot,
                    info.source_generation,
                    info.source_in_flight,
                ),
            )
            if state is not SlabState.UNMAPPED and (remote, at) == (connection.remote, slot)
        ]

    def unmapping(self, lease: StoreLease, slot: int, generation: int, forced: bool) -> None:
        """DONE means that the engine uses the slot no more, and says so of the right one."""
        for device, number, there, _ in [] if forced else self._users(lease, slot):
            if there == generation:
                self.failed(
                    f"DONE for slot {slot} generation {generation} of lease {lease.number}, "
                    f"where {device.name} has slab {number}: {device.engine.slab(number)}"
                )

    def mapping(self, lease: StoreLease, slot: int) -> None:
        """What is still on its way to a slot must not meet another slab there. A donor lends
        nothing while it protects a service."""
        for donor in self.donors:
            if donor.store.leases.get(lease.number) is lease and donor.harvester.is_held:
                self.failed(f"{donor.name} lends a slab and {donor.harvester.held_why}")
        for device, number, _, in_flight in self._users(lease, slot):
            if in_flight:
                self.failed(
                    f"slot {slot} of lease {lease.number} is used again while {device.name} has "
                    f"requests for slab {number} under way there: {device.engine.slab(number)}"
                )

    # ------------------------------------------------------------------ what happens

    def _turn(self, io_share: float) -> None:
        """One thing that can happen now happens."""
        loop, rng = self.loop, self.rng
        draw = rng.random()
        engine_share = self._engine_share
        if draw < engine_share:
            device = rng.choice(self.devices)
            if not device.threads_frozen:
                for _ in range(4):
                    device.step()
        elif draw < engine_share + io_share:
            device = rng.choice(self.devices)
            if not device.threads_frozen:
                device.submit()
        else:
            ready = [host for host in loop.hosts if host.ready and host.has_ready()]
            if not ready or draw > 0.995:
                # Whoever is ready may have no timer left, and is not kept waiting for long.
                loop.advance(min(loop.next_s(), loop.now_s + (_LOOK_S if ready else 10.0)))
            else:
                host = ready[0] if len(ready) == 1 else rng.choice(ready)
                loop.run_one(host)
                for device in self.devices:
                    if device.host is host:
                        device.settle_events()
        if self.problems:
            self._check()

    def until(
        self, done: Callable[[], bool], wait_s: float, what: str, io_share: float = 0.0
    ) -> None:
        """Goes on until something holds, for a bounded virtual time."""
        end_s = self.loop.now_s + wait_s
        while not done():
            look_s = self.loop.now_s + _LOOK_S
            for _ in range(20):
                self._turn(io_share)
                if self.loop.now_s >= look_s:
                    break
            if self.loop.now_s > end_s and not done():
                self.failed(f"not within {wait_s} s: {what}\n{self._figure()}")
                self._check()

    def run(self) -> int:
        """Lives the world from beginning to end; returns the hash of what happened.

        Raises:
            SimulationError: an invariant does not hold.
        """
        logger = logging.getLogger("infiniswap")
        watch, before = _Watch(self), (logger.level, logger.propagate)
        logger.addHandler(watch)
        logger.setLevel(logging.DEBUG if self._is_loud else logging.ERROR)
        logger.propagate = False
        try:
            with self.loop:
                self._build()
                self._live()
                self._end()
                self._check()
        finally:
            logger.removeHandler(watch)
            logger.setLevel(before[0])
            logger.propagate = before[1]
            with self.loop:
                self._tear_down()
        return self.loop.trace

    def _live(self) -> None:
        self.faults.begin()
        end_s = self.loop.now_s + self.rng.uniform(0.3, 1.0) * FAULTS_S
        while self.loop.now_s < end_s:
            self._turn(io_share=0.05)
        self.faults.end_all()
        self.say("no more faults")
        for device in self.devices:
            device.faults = False
        self.until(self._all_up, 30.0, "every donor is back", 0.05)

    def _all_up(self) -> bool:
        return all(donor.is_up and not donor.host.frozen for donor in self.donors)

    # ------------------------------------------------------------------------- end

    def _room(self) -> bool:
        """Whether the donors could take every slab of every device."""
        slabs = sum(device.slabs for device in self.devices)
        return sum(donor.store.slabs_max for donor in self.donors) >= slabs

    def _is_whole(self) -> bool:
        links = [link for device in self.devices for link in device.mapper.known_donors.links]
        infos = [info for device in self.devices for info in device.engine.slabs()]
        settled = {SlabState.MAPPED} if self._room() else {SlabState.MAPPED, SlabState.UNMAPPED}
        return {info.state for info in infos} <= settled and not any(
            link.state == "suspended" for link in links
        )

    def _end(self) -> None:
        self.until(self._is_whole, CALM_S_MAX, "every slab has a donor again", 0.06)
        # Nothing but the engine has work to do: hours of virtual time would pass meanwhile.
        self._engine_share = 0.7
        self.until(self._is_idle, 60.0, "every request ends")
        self._engine_share = 0.1
        self.until(lambda: not self._disagreement(), 30.0, "devices and donors agree")
        self._engine_share = 0.7
        for device in self.devices:
            for page in range(0, device.pages.count, REQUEST_PAGES_MAX):
                pages = min(REQUEST_PAGES_MAX, device.pages.count - page)
                device.request(lib.ISW_SIM_READ, page, pages)
                self.until(self._is_idle, 30.0, "the last reads end")
            stats = device.engine.stats()
            crc_errors = stats["crc_errors_remote"] + stats["crc_errors_backup"]
            self.pages_migrated += stats["pages_migrated"]
            if crc_errors:
                self.failed(f"{device.name}: only a checksum told that bytes were not its own")
        self._engine_share = 0.1
        tasks = [device.host.spawn(device.close(), "close") for device in self.devices]
        self.until(lambda: all(t.done() for t in tasks), 60.0, "the devices close")
        for device in self.devices:
            device.disconnect()
        self.until(lambda: not self._left(), 60.0, "nothing is left of the devices")
        # One that nobody needed may still be down; it would come up after it was told to stop.
        self.until(lambda: all(d.is_up for d in self.donors), 60.0, "every donor is back")
        for donor in self.donors:
            donor.stop()
        self.until(lambda: not any(d.is_up for d in self.donors), 60.0, "the donors stop")

    def _is_idle(self) -> bool:
        return not any(
            device.requests or device.engine.stats()["staging_pages_used"]
            for device in self.devices
        )

    def _disagreement(self) -> str:
        """Engine, links, tables and stores tell the same; "" when they do."""
        seen: dict[str, set[tuple[int, int, int]]] = {donor.name: set() for donor in self.donors}
        for device in self.devices:
            infos = device.engine.slabs()
            linked = {}
            for link in device.mapper.known_donors.links:
                if link.connections.lease is not None and not link.session.is_open:
                    return f"{device.name}: a lease and no session at {link.address}"
                held, donor = link.connections.lease, self._donor_of(link.address.host)
                known = donor.service.table.get(held.lease) if held else None
                if known is not None and known.tenant[1] != device.use.tenant:
                    return f"{donor.name} counts {device.name} as {known.tenant}"
                for slab, place in link.mapped.items():
                    if slab in linked:
                        return f"{device.name}: slab {slab} is at two donors"
                    linked[slab] = (link.remote, place.slot, place.generation)
                    seen[link.address.host].add((held.lease if held else 0, place.slot, slab))
            there = {
                slab: (info.remote, info.slot, info.generation)
                for slab, info in enumerate(infos)
                if info.state is not SlabState.UNMAPPED
            }
            if linked != there:
                return f"{device.name}: links say {linked}, the engine says {there}"
        for donor in self.donors:
            for lease in donor.service.table.leases():
                if lease.session is None:
                    return f"{donor.name}: lease {lease.lease} has no session"
            table = {
                (lease.lease, slot, info.slab)
                for lease in donor.service.table.leases()
                for slot, info in lease.slots.items()
            }
            store = {(e.number, slot) for e in donor.store.leases.values() for slot in e.slots}
            if {(lease, slot) for lease, slot, _ in table} != store:
                return f"{donor.name}: the table says {table}, the store says {store}"
            if table != seen[donor.name]:
                return f"{donor.name} says {table}, the devices say {seen[donor.name]}"
        return ""

    def _left(self) -> str:
        for donor in self.donors:
            if donor.store.leases or len(donor.service.table):
                return f"{donor.name}: leases {donor.store.leases}"
            if len(donor.service.sessions) or donor.server.sessions:
                return f"{donor.name}: sessions"
            if work := donor.service.work.under_way():
                return f"{donor.name}: work {work}"
            names = {task.get_name() for task in donor.host.open_tasks()}
            if names - {"harvest", "leases", "drain", "upkeep", "service guard"}:
                return f"{donor.name}: tasks {names}"
        for device in self.devices:
            if device.host.open_tasks() or device.mapper.events.drains:
                return f"{device.name}: {device.host.open_tasks()} {device.mapper.events.drains}"
        if self.network.open_connections():
            return f"{self.network.open_connections()} connections"
        return ""

    def _figure(self) -> str:
        lines = [f"{self._disagreement()}; {self._left()}"]
        for device in self.devices:
            lines += [f"{device.name}: {info}" for info in device.engine.slabs()]
            lines += [
                f"{device.name}: {link.address} {link.state} {link.detail!r} "
                f"{link.session.is_draining}"
                for link in device.mapper.known_donors.links
            ]
            lines += [f"{device.name}: open {request}" for request in device.requests.values()]
            lines += [f"{device.name}: {task}" for task in device.host.open_tasks()]
        for donor in self.donors:
            lines.append(
                f"{donor.name}: up {donor.is_up}, slabs {donor.store.slabs_max}, "
                f"{donor.store.stats()}, draining {donor.service.drain.is_active}, "
                f"at most {donor.harvester.mapped_max} lent"
            )
        return "\n".join(lines)

    def _tear_down(self) -> None:
        problems = len(self.problems)
        for donor in self.donors:
            if donor.is_up:
                donor.crash(silently=False)
        for device in self.devices:
            device.kill()
        for device in self.devices + self._gone:
            device.engine.close()
        self.loop.kill(self.loop.world)
        del self.problems[problems:]  # of a world that has failed already
