# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a simulated world. Each fault undoes itself after a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from support.devices.stepped_engine import lib

if TYPE_CHECKING:
    from simulation.device import SimDevice
    from simulation.donor import SimDonor
    from simulation.loop import Host
    from simulation.world import World

HOUR_S = 3600.0


class Faults:
    """Draws faults until it is told to end them all.

    Args:
        world: that they happen in.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._undo: dict[object, Callable[[], None]] = {}
        self.counts: dict[str, int] = {}
        self.is_over = False
        self._numbers = 0
        kinds: list[Callable[[], None]] = [
            *(self.cut_session, self.cut_data, self.flap, self.partition, self.partition),
            *(self.stall_data, self.crash, self.crash, self.restart, self.crash_and_keep),
            *(self.crash_and_keep, self.restart_and_keep, self.freeze_donor, self.freeze_device),
            *(self.kill_device, self.evict, self.evict, self.drain, self.squeeze, self.disk),
            *(self.refuse, self.steal, self.overload, self.unmeasured),
        ]
        # Few kinds per seed: what is rare together with everything else is then common.
        self._kinds = self._rng.sample(kinds, self._rng.randrange(2, len(kinds)))

    def begin(self) -> None:
        """From now on, every second or so."""
        self._later(self._rng.expovariate(1.0), self._next)

    def _next(self) -> None:
        if not self.is_over:
            kind = self._rng.choice(self._kinds)
            self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1
            self._tell(kind.__name__)
            kind()
            self.begin()

    def _tell(self, what: str) -> None:
        self._world.loop.note(what)
        self._world.say(what)

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        self._world.loop.world.run(self._world.loop.call_later, after_s, call)

    def _for(self, key: object, undo: Callable[[], None], s: float | None = None) -> None:
        """Undoes it after a while, or at the end."""
        self._numbers += 1
        key = (key, self._numbers)  # the same may happen twice at a time
        self._undo[key] = undo
        after_s = s or self._rng.choice((0.05, 0.5, 1.5, 3.0, 6.0))
        self._later(after_s, lambda: self._end(key, undo))

    def _end(self, key: object, undo: Callable[[], None]) -> None:
        if self._undo.get(key) is undo:
            del self._undo[key]
            self._tell(f"end of {key}")
            undo()

    def end_all(self) -> None:
        """The world is whole again."""
        self.is_over = True
        for key, undo in list(self._undo.items()):
            self._end(key, undo)

    def _donor(self) -> SimDonor:
        return self._rng.choice(self._world.donors)

    def _device(self) -> SimDevice:
        return self._rng.choice(self._world.devices)

    # --------------------------------------------------------------------- network

    def cut_session(self) -> None:
        """A control connection breaks."""
        self._world.network.cut_sessions(self._device().name, self._donor().name)

    def cut_data(self) -> None:
        """Data connections break."""
        self._cut_data(self._device(), self._donor())

    @staticmethod
    def _cut_data(device: SimDevice, donor: SimDonor) -> None:
        for connection in device.engine.live():
            if connection.donor == donor.name:
                device.remote_step(lib.ISW_STEP_REMOTE_DOWN, connection)
        device.settle_events()

    def flap(self) -> None:
        """Connections between two hosts break again and again."""
        device, donor = self._device(), self._donor()
        after_s = 0.0
        for _ in range(self._rng.randrange(3, 12)):
            after_s += self._rng.expovariate(50.0)
            cut_data = self._rng.random() < 0.7
            self._later(after_s, functools.partial(self._flap, device, donor, cut_data))

    def _flap(self, device: SimDevice, donor: SimDonor, cut_data: bool) -> None:
        if not cut_data:
            self._world.network.cut_sessions(device.name, donor.name)
        elif not device.host.dead:
            self._cut_data(device, donor)

    def partition(self) -> None:
        """Nothing goes through between two hosts, or between one donor and everybody."""
        donor, network = self._donor(), self._world.network
        devices = self._world.devices if self._rng.random() < 0.3 else [self._device()]
        for device in devices:
            network.partition(device.name, donor.name)

        def heal() -> None:
            for device in devices:
                network.heal(device.name, donor.name)

        self._for(("partition", donor.name), heal)

    def stall_data(self) -> None:
        """Pages do not get through; messages do."""
        pair = (self._device().name, self._donor().name)
        self._world.stalled_pairs.add(pair)
        self._for(("stall", pair), lambda: self._world.stalled_pairs.discard(pair))

    # ------------------------------------------------------------------- processes

    def crash(self) -> None:
        """A donor is gone at once, with or without its host; later it is back, and empty."""
        self._crash(self._donor(), keeps=False)

    def crash_and_keep(self) -> None:
        """A donor's daemon is killed; the next one finds its slabs, and what was written down."""
        self._crash(self._donor(), keeps=True)

    def _crash(self, donor: SimDonor, keeps: bool) -> None:
        if donor.is_up:
            donor.crash(not keeps and self._rng.random() < 0.5, keeps)
            self._for(("crash", donor.name), donor.start)

    def restart(self) -> None:
        """A donor's daemon is stopped, and started again."""
        self._restart(keeps=False)

    def restart_and_keep(self) -> None:
        """Likewise, with its slabs."""
        self._restart(keeps=True)

    def _restart(self, keeps: bool) -> None:
        donor = self._donor()
        if donor.is_up and not donor.host.frozen:
            host = donor.host
            donor.stop(keeps)

            def again() -> None:
                if donor.is_up and donor.host is host:  # still stopping
                    self._for(("crash", donor.name), again, 1.0)
                else:
                    donor.start()

            self._for(("crash", donor.name), again)

    def _clock_jump(self, since_s: float) -> float:
        """What a clock that was not looked at shows then: it ran, it stood, or it ran for longer
        than the others can be asked to wait in a test."""
        passed_s = self._world.loop.now_s - since_s
        return self._rng.choice((0.0, -passed_s, HOUR_S))

    def freeze_donor(self) -> None:
        """A donor's interpreter, or its whole process, does not run."""
        donor = self._donor()
        if donor.is_up:
            self._freeze(donor, donor.host)

    def freeze_device(self) -> None:
        """Likewise a device."""
        device = self._device()
        self._freeze(device, device.host)

    def _freeze(self, who: SimDonor | SimDevice, host: Host) -> None:
        if host.frozen:
            return
        since_s = self._world.loop.now_s
        host.frozen = True
        who.threads_frozen = self._rng.random() < 0.5

        def thaw() -> None:
            who.threads_frozen = False
            if not host.dead:
                host.skew_s += self._clock_jump(since_s)
                host.frozen = False
                self._world.loop.wake(host)

        self._for(("freeze", who.name), thaw)

    def kill_device(self) -> None:
        """A device's process is gone; another one takes its place at once, under its name."""
        self._world.replace_device(self._rng.randrange(len(self._world.devices)))

    # ---------------------------------------------------------------------- memory

    def evict(self) -> None:
        """A donor takes slabs back."""
        donor = self._donor()
        if donor.is_up:
            count = self._rng.randrange(1, 4)
            move_s = self._rng.choice([0.0, 0.0, 0.3, 5.0])
            donor.host.spawn(donor.service.evictor.evict(count, move_s=move_s), "evict")

    def drain(self) -> None:
        """An administrator drains a donor."""
        donor = self._donor()
        if donor.is_up:
            donor.set_draining(True)

            def undrain() -> None:
                if donor.is_up:
                    donor.set_draining(False)
                else:
                    self._for(("drain", donor.name), undrain, 1.0)

            self._for(("drain", donor.name), undrain)

    def squeeze(self) -> None:
        """A donor's host needs its memory."""
        donor = self._donor()
        donor.memory.others_bytes = round(donor.memory.total_bytes * self._rng.uniform(0.3, 1.0))

        self._for(("squeeze", donor.name), lambda: setattr(donor.memory, "others_bytes", 0))

    def refuse(self) -> None:
        """A donor's host gives no memory, its old connections do not drain."""
        donor = self._donor()
        store = donor.store

        def refuse(share: float) -> None:
            store.refuse_memory, store.renewals_fail_share = bool(share), share

        refuse(0.5)
        self._for(("refuse", donor.name), lambda: refuse(0.0))

    def overload(self) -> None:
        """A service on a donor's host comes close to its bound, or above it."""
        donor = self._donor()
        donor.service_latency = self._rng.uniform(0.7, 2.0)
        self._for(("overload", donor.name), lambda: setattr(donor, "service_latency", 0.1))

    def unmeasured(self) -> None:
        """The latency of a service on a donor's host comes late, or not at all."""
        donor = self._donor()
        donor.measure_fails = self._rng.random() < 0.5
        donor.measure_s = self._rng.choice((0.001, 0.2, 600.0))

        def heal() -> None:
            donor.measure_fails, donor.measure_s = False, 0.001

        self._for(("unmeasured", donor.name), heal)

    def steal(self) -> None:
        """Somebody reads a donor's tickets, and uses some of them first."""
        donor = self._donor()
        store = donor.store
        store.tickets_stolen_share = 0.5
        self._for(("steal", donor.name), lambda: setattr(store, "tickets_stolen_share", 0.0))

    def disk(self) -> None:
        """A device's backup refuses writes and reads."""
        device = self._device()
        device.disk_fails = True
        self._for(("disk", device.name), lambda: setattr(device, "disk_fails", False))
