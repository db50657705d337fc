# SPDX-License-Identifier: Apache-2.0
"""A donor's store for the simulation: the rules of csrc/store, over memory that engines reach.

Connections of simulated engines (`simulation.engine`) are bound to a lease; a slot's memory is laid
into each of them when it is mapped and taken out when it is fenced. What a donor's table says and
what a device can read or write are therefore one thing.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from infiniswap.engine.binding import ffi
from infiniswap.engine.store import LeaseStats, MappedSlot, RestoredSlot
from infiniswap.errors import EngineError
from infiniswap.rdma_address import RdmaEnd, RdmaKey
from infiniswap.units import GIB, PAGE_BYTES

if TYPE_CHECKING:
    from simulation.engine import Connection
    from simulation.world import World

SLAB_PAGES = 16
SLAB_BYTES = SLAB_PAGES * PAGE_BYTES
PRETENDED_BYTES = 16 * GIB
"""Of a slab, for the policy: it looks at a host with little memory twenty times a second."""
_ZEROS = bytes(SLAB_BYTES)


@dataclass(slots=True)
class Slot:
    generation: int
    memory: Any
    slab: int = 0


@dataclass(slots=True)
class StoreLease:
    number: int
    slots_max: int
    epoch: int = 1
    tickets: dict[int, str] = field(default_factory=dict)
    """By the number of the connection; opened connections keep theirs."""
    slots: dict[int, Slot] = field(default_factory=dict)
    slot_next: int = 0
    forced: dict[int, list[Connection]] = field(default_factory=dict)
    """Slots that were taken back without their device's word, and who was connected then."""
    connections: list[Connection] = field(default_factory=list)


@dataclass(slots=True)
class Files:
    """What lies in a directory of slabs when its daemon is dead."""

    mapped: dict[int, dict[int, Slot]] = field(default_factory=dict)
    free: list[Any] = field(default_factory=list)
    dirty: list[Any] = field(default_factory=list)
    last_lease: int = 0
    last_generation: int = 0


class SimStore:
    """infiniswap.engine.protocol.Store.

    Args:
        world: told before a slot is emptied or filled.
        slabs_max: of the pool.
        rng: tickets, which of them are stolen, and which renewals find connections that do not
            drain.
        files: what a predecessor has left.
    """

    def __init__(self, world: World, slabs_max: int, rng: Random, files: Files) -> None:
        self.slabs_max = slabs_max
        self.renewals_fail_share = 0.0
        self.tickets_stolen_share = 0.0
        self.refuse_memory = False
        self.closed = False
        self.leases: dict[int, StoreLease] = {}
        self._world = world
        self._rng = rng
        self._free = list(files.free)
        self._dirty = list(files.dirty)
        self._orphans = dict(files.mapped)
        self._last_lease = files.last_lease
        self._last_generation = files.last_generation

    @property
    def pool_bytes(self) -> int:
        return self._total() * PRETENDED_BYTES

    def _total(self) -> int:
        mapped = sum(len(entry.slots) for entry in self.leases.values())
        orphans = sum(len(slots) for slots in self._orphans.values())
        return len(self._free) + len(self._dirty) + mapped + orphans

    def _find(self, lease: int) -> StoreLease:
        if lease not in self.leases:
            raise EngineError(f"no lease {lease}", code=errno.ENOENT)
        return self.leases[lease]

    # ------------------------------------------------------------------------ pool

    def listen(self, host: str, port: int) -> int:
        return port

    def preallocate(self) -> None:
        if self.refuse_memory:
            raise EngineError("no memory", code=errno.ENOMEM)
        if self._total() >= self.slabs_max:
            raise EngineError("the pool is full", code=errno.ENOSPC)
        self._free.append(ffi.new("uint8_t[]", SLAB_BYTES))

    def release_free(self) -> bool:
        """A dirty slab, or else a free one, to the host."""
        if not self._dirty and not self._free:
            return False
        (self._dirty or self._free).pop()
        return True

    def scrub(self) -> bool:
        if not self._dirty:
            return False
        memory = self._dirty.pop()
        ffi.memmove(memory, _ZEROS, SLAB_BYTES)
        self._free.append(memory)
        return True

    def stats(self) -> dict[str, int]:
        """Those fields of isw_store_stats that the donor looks at."""
        return {
            "slabs_free": len(self._free),
            "slabs_mapped": sum(len(entry.slots) for entry in self.leases.values()),
            "slabs_dirty": len(self._dirty),
            "slabs_unpinned": 0,
            "connections": sum(len(entry.connections) for entry in self.leases.values()),
        }

    # --------------------------------------------------------------------- restart

    def files(self) -> Files:
        """What a successor finds if this one dies now. Numbers go on in leaps."""
        mapped = {number: dict(entry.slots) for number, entry in self.leases.items()}
        numbers = self._last_lease + 1024, self._last_generation + 1024
        return Files(mapped, list(self._free), list(self._dirty), *numbers)

    def pin(self) -> bool:
        return False

    def notes(self) -> list[str]:
        return []

    def lease_restore(self, lease: int, slots_max: int, epoch: int) -> list[RestoredSlot]:
        """A lease of before; it has no tickets."""
        slots = self._orphans.pop(lease, {})
        self.leases[lease] = StoreLease(lease, slots_max, epoch, slots=slots)
        return [RestoredSlot(n, slot.generation, slot.slab) for n, slot in slots.items()]

    def restored(self) -> None:
        """Slabs of leases that nobody has named are nobody's."""
        for slots in self._orphans.values():
            self._dirty += [slot.memory for slot in slots.values()]
        self._orphans.clear()

    # ---------------------------------------------------------------------- leases

    def lease_create(self, slots_max: int) -> int:
        self._last_lease += 1
        entry = StoreLease(self._last_lease, slots_max)
        self.leases[entry.number] = entry
        return entry.number

    def lease_renew(self, lease: int, wait_ms_max: int) -> None:
        """Closes the old connections; every ticket is dead."""
        entry = self._find(lease)
        if self._rng.random() < self.renewals_fail_share:
            raise EngineError("connections are still open", code=errno.ETIMEDOUT)
        self._cut(entry)
        entry.epoch += 1
        entry.tickets.clear()

    def ticket(
        self, lease: int, number: int, *, uses: int = 1, good_ms: int = 0, wait_ms_max: int = 0
    ) -> str:
        """Ends the connections that the number's earlier ticket has opened. How long it is good is
        of no interest here: whoever connects does so at once, or loses it."""
        entry = self._find(lease)
        self.ticket_end(lease, number)
        entry.tickets[number] = f"{self._rng.getrandbits(128):032x}"
        return entry.tickets[number]

    def ticket_end(self, lease: int, number: int) -> None:
        entry = self._find(lease)
        entry.tickets.pop(number, None)
        self._cut(entry, number)

    def use_tickets(self, tickets: Sequence[str]) -> StoreLease | None:
        """What the tickets open, once."""
        for entry in self.leases.values():
            numbers = [n for n, ticket in entry.tickets.items() if ticket in tickets]
            if len(numbers) == len(tickets):
                for number in numbers:
                    del entry.tickets[number]
                is_stolen = self._rng.random() < self.tickets_stolen_share
                return None if is_stolen else entry
        return None

    def lease_destroy(self, lease: int) -> None:
        """Closes the connections; every slab is dirty."""
        entry = self._find(lease)
        self._cut(entry)
        for slot in list(entry.slots):
            self._empty(entry, slot)
        del self.leases[lease]

    def lease_stats(self, lease: int) -> LeaseStats:
        entry = self._find(lease)
        count = len(entry.connections)
        return LeaseStats(entry.epoch, entry.slots_max, len(entry.slots), count, 0, 0)

    def _cut(self, entry: StoreLease, number: int | None = None) -> None:
        """All, or those of a ticket's number: a connection here stands for a device's whole set."""
        for connection in [c for c in entry.connections if number is None or number < c.queues]:
            connection.closed_by_donor()
            entry.connections.remove(connection)

    # ----------------------------------------------------------------------- slots

    def map(self, lease: int, slab: int) -> MappedSlot | None:
        """A free slab into an empty slot; reuse comes as late as it can."""
        entry = self._find(lease)
        if not self._free:
            return None
        numbers = ((entry.slot_next + i) % entry.slots_max for i in range(entry.slots_max))
        empty = [number for number in numbers if number not in entry.slots]
        slot = next((number for number in empty if not self._is_barred(entry, number)), None)
        if slot is None and empty:
            self._cut(entry)
            raise EngineError("slots wait for the end of old connections", code=errno.EAGAIN)
        if slot is None:
            raise EngineError("no empty slot", code=errno.ENOSPC)
        entry.forced.pop(slot, None)
        self._world.mapping(entry, slot)
        memory = self._free.pop()
        if bytes(ffi.buffer(memory)) != _ZEROS:
            raise AssertionError("a slab that is not zeroed is lent")
        self._last_generation += 1
        entry.slots[slot] = Slot(self._last_generation, memory, slab)
        entry.slot_next = (slot + 1) % entry.slots_max
        for connection in entry.connections:
            connection.lay(slot, memory)
        return MappedSlot(slot, self._last_generation)

    @staticmethod
    def _is_barred(entry: StoreLease, slot: int) -> bool:
        # Requests for the slab that was there may still come by these.
        return any(old in entry.connections for old in entry.forced.get(slot, ()))

    def unmap(self, lease: int, slot: int, generation: int, wait_ms_max: int) -> None:
        """Fences a slot. Requests that took effect have their bytes; others are refused."""
        entry = self._find(lease)
        if slot not in entry.slots or entry.slots[slot].generation != generation:
            raise EngineError("another generation", code=errno.ESTALE)
        self._world.unmapping(entry, slot, generation, not wait_ms_max)
        if not wait_ms_max:
            entry.forced[slot] = list(entry.connections)
        self._empty(entry, slot)

    def _empty(self, entry: StoreLease, slot: int) -> None:
        for connection in entry.connections:
            connection.lay(slot, None)
        self._dirty.append(entry.slots.pop(slot).memory)

    # ------------------------------------------------- RDMA, which hosts here have not

    def rdma_open(
        self, lease: int, peers: Sequence[RdmaEnd], scope: int = 0
    ) -> tuple[Sequence[RdmaEnd], RdmaKey]:
        raise EngineError("no RDMA: this host has no RDMA device", code=errno.ENODEV)

    def rdma_close(self, lease: int) -> None: ...

    def rdma_pause(self, lease: int) -> None: ...

    def rdma_key(self, lease: int, slot: int, generation: int, *, at_hand: bool = False) -> RdmaKey:
        raise EngineError("no connections by RDMA", code=errno.ENOTCONN)

    def rdma_ahead(self) -> bool:
        raise EngineError("no RDMA: this host has no RDMA device", code=errno.ENODEV)

    def rdma_let_go(self) -> int:
        return 0

    def rdma_ahead_end(self) -> None: ...

    def close(self) -> None:
        self.closed = True
        for entry in self.leases.values():
            self._cut(entry)
        self.leases.clear()
        self._free.clear()
        self._dirty.clear()
