# SPDX-License-Identifier: Apache-2.0
"""What devices and donors do with each other: map, evict, move, suspend, give back.

The daemons decide by the policies, and so does this; here the answers come at once, and only copies
and deadlines take time. Each request and each answer counts as a message of the control protocol;
sessions and their heartbeats do not.
"""

from __future__ import annotations

import errno
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

from infiniswap.policy.donor_faults import DonorFaults
from infiniswap.policy.eviction import Batch
from infiniswap.simulation.device import Device
from infiniswap.simulation.donor import DonorHost, Lent
from infiniswap.simulation.scenario import Scenario
from infiniswap.simulation.search import search_for
from infiniswap.simulation.timeline import Timeline

COUNTS: Final = (
    *("jobs", "jobs_without_host", "mapped", "remapped", "not_placed", "refused"),
    *("evictions", "eviction_batches", "moved", "returned"),
    *("failures", "suspended", "recovered", "distrusted"),
)
"""mapped: slabs that got a donor, moves left out; remapped: of these, those that had lost theirs;
not_placed: searches that found no donor; refused: slabs for which a donor had room when it was
asked and none when it was to map them; evictions: slabs that donors took back; moved: of these,
those that went to another donor, copied as far as time allowed; returned: slabs that went back
empty; suspended: slabs whose donor failed; recovered: of these, those whose donor came back in
time; distrusted: donors that a device gave up for their faults."""


class Exchange:
    """Between all devices and all donors.

    Args:
        scenario: what is simulated.
        donors: all of them.
        rule: how slabs get donors.
        rng: source of randomness of placement.
        timeline: for what takes time.

    Attributes:
        counts: see COUNTS.
        messages: by kind.
        busy: devices to look at in the next period.
    """

    def __init__(
        self,
        scenario: Scenario,
        donors: Sequence[DonorHost],
        rule: str,
        rng: Random,
        timeline: Timeline,
    ) -> None:
        self._config = scenario.config
        self._move_pages_per_s = scenario.run.move_pages_per_s
        self._maps_max = math.ceil(scenario.run.period_s / scenario.run.map_s)  # in a period
        self._timeline = timeline
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.messages: Counter[str] = Counter()
        self._search = search_for(
            rule, donors, scenario.config.policy, rng, self._map, self.messages
        )
        self._moves: dict[Lent, tuple[DonorHost, Lent]] = {}
        self.busy: dict[Device, None] = {}

    # ------------------------------------------------------------------------ mapping

    def map_wanted(self, device: Device, now_s: float) -> None:
        """Maps the slabs that need a donor, until one finds none
        (infiniswap.device.slabs.mapper), or the period is over."""
        for slab in device.wanted()[: self._maps_max]:
            if not self._search.place(device, slab, now_s, None):
                self.counts["not_placed"] += 1
                return
            self.counts["mapped"] += 1
            self.counts["remapped"] += slab in device.urgent
            device.urgent.discard(slab)

    def _map(self, device: Device, slab: int, donor: DonorHost, now_s: float) -> bool:
        lent = self._lend(device, slab, donor, now_s)
        if lent is None:
            self.counts["refused"] += 1
            return False
        device.mapped(slab, donor, lent)
        return True

    def _lend(self, device: Device, slab: int, donor: DonorHost, now_s: float) -> Lent | None:
        if donor not in device.leases:
            device.leases.add(donor)
            self.messages["lease"] += 2
        self.messages["map"] += 2
        if not donor.make_ready() and not self._make_room(donor, device, now_s):
            return None
        return donor.lend(device, slab) if donor.pool.free else None

    def _make_room(self, donor: DonorHost, device: Device, now_s: float) -> bool:
        """Takes a slab back from a tenant with more than its share (infiniswap.donor.quota)."""
        among = [] if donor.is_short else donor.gives(device)
        if not among:
            return False
        return bool(self._take_back(donor, 1, now_s, among)) and donor.make_ready()

    # ----------------------------------------------------------------------- eviction

    def evict(self, donor: DonorHost, count: int, urgent: bool, now_s: float) -> None:
        """A donor is short of memory."""
        batch = donor.batches.begin(count, urgent, now_s)
        if batch is None:
            return
        if urgent or not self._config.daemon.evict_move_s:
            donor.batches.end(batch, self._take_back(donor, batch.count, now_s), now_s)
        else:
            self._move_away(donor, batch, now_s)

    def _chosen(
        self,
        donor: DonorHost,
        count: int,
        now_s: float,
        among: Sequence[Lent] | None,
        in_hurry: bool,
    ) -> list[Lent]:
        batch = donor.choice.ask(list(donor.held), count, now_s, among, in_hurry=in_hurry)
        if not batch.asked and not batch.hurried:
            return []
        self.counts["eviction_batches"] += 1
        owners = {lent.device for lent in batch.asked} if len(batch.asked) > 1 else set()
        self.messages["activity"] += 2 * len(owners)
        for device in owners:
            device.look(now_s)
        activity = {lent: lent.device.activity(lent.slab) for lent in batch.asked if owners}
        return batch.hurried + donor.choice.take(batch, activity, in_hurry=in_hurry)

    def _take_back(
        self, donor: DonorHost, count: int, now_s: float, among: Sequence[Lent] | None = None
    ) -> int:
        """In a hurry: their consumers read the backup from now on. Returns how many came back."""
        chosen = self._chosen(donor, count, now_s, among, in_hurry=True)
        for lent in chosen:
            self.messages["evict"] += 2
            if (move := self._moves.pop(lent, None)) is not None:  # hurried: it is cut short
                self._settle(lent, move, 0)
            elif lent.device.at[lent.slab] == (donor, lent):
                self._homeless(lent.device, lent.slab)
            donor.choice.moved(lent)
            donor.take(lent)
            self._evicted(donor, lent, now_s)
        return len(chosen)

    def _homeless(self, device: Device, slab: int) -> None:
        """A slab has lost its donor and gets another one at once."""
        device.unmapped(slab)
        device.urgent.add(slab)
        self.busy[device] = None

    def _evicted(self, donor: DonorHost, lent: Lent, now_s: float) -> None:
        self.counts["evictions"] += 1
        lent.device.backoff.full(donor, now_s)

    def _move_away(self, donor: DonorHost, batch: Batch, now_s: float) -> None:
        """Without hurry: consumers have time to copy their slabs to other donors first."""
        chosen = self._chosen(donor, batch.count, now_s, None, in_hurry=False)
        if not chosen:
            donor.batches.end(batch, 0, now_s)
        move_s = self._config.daemon.evict_move_s
        left = Counter({"slabs": len(chosen), "came": 0})
        for lent in chosen:
            self.messages["evict"] += 2
            lent.device.backoff.full(donor, now_s)
            copy_s = lent.device.pages(lent.slab) / self._move_pages_per_s
            target = self._target(donor, lent, now_s)
            if target is not None:
                self._moves[lent] = target
            end_s = now_s + (min(copy_s, move_s) if target is not None else 0.0)
            share = 1.0 if copy_s <= move_s else move_s / copy_s
            self._timeline.at(end_s, partial(self._moved, donor, lent, batch, left, share))

    def _target(self, donor: DonorHost, lent: Lent, now_s: float) -> tuple[DonorHost, Lent] | None:
        """Another donor that has room for the slab, where it is lent from now on, too."""
        device, slab = lent.device, lent.slab
        before = device.at[slab]
        if before is None or before[1] is not lent:
            return None
        device.unmapped(slab)
        found = self._search.place(device, slab, now_s, donor)
        target = device.unmapped(slab) if found else None
        device.mapped(slab, *before, filled_pages=device.pages(slab))
        return target

    def _moved(
        self,
        donor: DonorHost,
        lent: Lent,
        batch: Batch,
        left: Counter[str],
        share: float,
        now_s: float,
    ) -> None:
        device = lent.device
        if donor.take(lent):  # else it was taken in a hurry, or the job or the host has ended
            move = self._moves.pop(lent, None)
            if move is not None:
                self._settle(lent, move, int(share * device.pages(lent.slab)))
            elif device.at[lent.slab] == (donor, lent):
                self._homeless(device, lent.slab)
            left["came"] += 1
            self._evicted(donor, lent, now_s)
        donor.choice.moved(lent)
        left["slabs"] -= 1
        if not left["slabs"] and lent.epoch == donor.epoch:
            donor.batches.end(batch, left["came"], now_s)

    def _settle(self, lent: Lent, move: tuple[DonorHost, Lent], pages: int) -> None:
        """The slab is at its new donor, with so many pages copied."""
        device, (target, there) = lent.device, move
        if there in target.held and target.is_alive:
            self.counts["moved"] += 1
            device.unmapped(lent.slab)
            device.mapped(lent.slab, target, there, filled_pages=pages)
            self.busy[device] = None
        else:
            self._homeless(device, lent.slab)

    # ----------------------------------------------------------------- ends of all kinds

    def give_back(self, device: Device, slab: int) -> None:
        """A slab that is empty goes back."""
        where = device.unmapped(slab)
        if where is not None:
            self.messages["unmap"] += 2
            self.counts["returned"] += 1
            where[0].take(where[1])

    def close(self, device: Device) -> None:
        """A job has ended: its leases are released."""
        device.is_closed = True
        self.busy.pop(device, None)
        self.messages["release"] += 2 * sum(donor.is_alive for donor in device.donors)
        for slab in range(len(device.at)):
            where = device.unmapped(slab)
            if where is None:
                continue
            if (move := self._moves.pop(where[1], None)) is not None:
                move[0].take(move[1])
            where[0].take(where[1])

    def lost(self, donor: DonorHost, now_s: float) -> None:
        """A donor does not answer: its slabs are suspended."""
        devices = list(dict.fromkeys(lent.device for lent in donor.held))
        give_up_s = now_s + self._config.policy.suspend_s
        for device in devices:
            self.counts["suspended"] += device.donors[donor]
            faults = device.faults.setdefault(donor, DonorFaults())
            if faults.lost(now_s, -errno.ECONNRESET):
                self.counts["distrusted"] += 1
                device.backoff.distrusted(donor, now_s)
                faults.given_up()
                self._give_up(donor, device, donor.epoch, now_s)
            else:
                call = partial(self._give_up, donor, device, donor.epoch)
                self._timeline.at(give_up_s, call)

    def _give_up(self, donor: DonorHost, device: Device, epoch: int, now_s: float) -> None:
        """The donor has not come back in time: its slabs get other donors."""
        if device.is_closed or (donor.is_alive and donor.epoch == epoch):
            return
        device.backoff.unreachable(donor, now_s)
        device.leases.discard(donor)
        for slab, where in enumerate(device.at):
            if where is not None and where[0] is donor:
                donor.take(where[1])
                self._homeless(device, slab)

    def recovered(self, donor: DonorHost, now_s: float) -> None:
        """A donor is back."""
        for device in dict.fromkeys(lent.device for lent in donor.held):
            self.counts["recovered"] += device.donors[donor]
            if donor in device.faults:
                device.faults[donor].recovered(now_s)
            device.backoff.good(donor)
            self.messages["renew"] += 2
