# SPDX-License-Identifier: Apache-2.0
"""A donor's store without memory and without a port: the bookkeeping of isw_store."""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from infiniswap.engine.store import LeaseStats, MappedSlot, RestoredSlot, StoreConfig
from infiniswap.errors import EngineError
from infiniswap.rdma_address import RdmaEnd, RdmaKey

_WAIT_S = 60.0


@dataclass(slots=True)
class _Lease:
    slots_max: int
    epoch: int = 1
    tickets: dict[int, str] = field(default_factory=dict)
    connections: int = 0
    rdma: bool = False
    slots: dict[int, int] = field(default_factory=dict)


class FakeStore:
    """infiniswap.engine.protocol.Store in memory. Thread-safe.

    Attributes:
        refuse_memory: while true, preallocate fails as on a host without memory.
        has_rdma: whether this host has an RDMA device; it has not, at first.
        rdma_is_leaving: whether the host is about to remove it.
        refuse_registration: while true, no slab can be registered with it.
        renewals_blocked: while true, renewals time out as with a connection that does not drain.
        destroyed: lease_destroy returns only while this is set (it is, at first).
        closed: whether close was called.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.refuse_memory = False
        self.has_rdma = False
        self.rdma_is_leaving = False
        self.refuse_registration = False
        self.renewals_blocked = False
        self.destroyed = threading.Event()
        self.destroyed.set()
        self.closed = False
        self.unpinned = 0
        self.pinning = threading.Event()
        self.pinning.set()
        self._lock = threading.Lock()
        self._free = 0
        self._dirty = 0
        self._leases: dict[int, _Lease] = {}
        self.rdma_scope = 0
        """Of the last rdma_open."""
        self._next_lease = 1
        self._next_generation = 1
        self._registered: set[int] = set()  # by generation

    @property
    def pool_bytes(self) -> int:
        """Memory that the slabs would occupy."""
        with self._lock:
            return self._total() * self.config.slab_bytes

    def set_connections(self, lease: int, count: int) -> None:
        """Pretends that a lease has `count` data connections."""
        with self._lock:
            self._find(lease).connections = count

    def tickets(self, lease: int) -> dict[int, str]:
        """Those in force, by the number of the connection."""
        with self._lock:
            return dict(self._find(lease).tickets)

    def listen(self, host: str, port: int) -> int:
        """Pretends to listen."""
        return port or 40_000

    def preallocate(self) -> None:
        """Adds a free slab."""
        with self._lock:
            if self.refuse_memory:
                raise EngineError("cannot add a slab: no memory", code=errno.ENOMEM)
            if self._total() >= self.config.slabs_max:
                raise EngineError("cannot add a slab: the pool is full", code=errno.ENOSPC)
            self._free += 1

    def release_free(self) -> bool:
        """Drops a dirty slab, or else a free one."""
        with self._lock:
            if self._dirty:
                self._dirty -= 1
                return True
            found = self._free > 0
            self._free -= found
            return found

    def scrub(self) -> bool:
        """Turns a dirty slab into a free one."""
        with self._lock:
            found = self._dirty > 0
            self._dirty -= found
            self._free += found
            return found

    def pin(self) -> bool:
        """Pins one of `unpinned`."""
        self.pinning.wait()
        self.unpinned -= self.unpinned > 0
        return self.unpinned > 0

    def notes(self) -> list[str]:
        """Nothing is found."""
        return []

    def lease_restore(self, lease: int, slots_max: int, epoch: int) -> list[RestoredSlot]:
        """A predecessor's lease; its slabs are gone."""
        with self._lock:
            self._leases[lease] = _Lease(slots_max, epoch)
            self._next_lease = max(self._next_lease, lease + 1)
            return []

    def restored(self) -> None:
        """Nothing is left over."""

    def lease_create(self, slots_max: int) -> int:
        """A new lease."""
        with self._lock:
            if len(self._leases) >= self.config.leases_max:
                raise EngineError("too many leases", code=errno.ENOSPC)
            number = self._next_lease
            self._next_lease += 1
            self._leases[number] = _Lease(slots_max)
            return number

    def lease_renew(self, lease: int, wait_ms_max: int) -> None:
        """Cuts the lease's connections; its tickets are dead."""
        with self._lock:
            entry = self._find(lease)
            if self.renewals_blocked:
                raise EngineError("connections are still open", code=errno.ETIMEDOUT)
            entry.connections = 0
            entry.rdma = False
            entry.epoch += 1
            entry.tickets.clear()

    def ticket(
        self, lease: int, number: int, *, uses: int = 1, good_ms: int = 0, wait_ms_max: int = 0
    ) -> str:
        """A ticket; the earlier one of that number is dead."""
        with self._lock:
            entry = self._find(lease)
            if self.renewals_blocked:
                raise EngineError("connections are still open", code=errno.ETIMEDOUT)
            entry.tickets[number] = secrets.token_hex(16)
            return entry.tickets[number]

    def ticket_end(self, lease: int, number: int) -> None:
        """Ends a ticket."""
        with self._lock:
            self._find(lease).tickets.pop(number, None)

    def lease_destroy(self, lease: int) -> None:
        """Ends a lease; its slabs become dirty."""
        with self._lock:
            self._dirty += len(self._find(lease).slots)
            del self._leases[lease]
        self.destroyed.wait(_WAIT_S)

    def lease_stats(self, lease: int) -> LeaseStats:
        """Counters of a lease."""
        with self._lock:
            entry = self._find(lease)
            return LeaseStats(
                epoch=entry.epoch,
                slots_max=entry.slots_max,
                slots_mapped=len(entry.slots),
                connections=entry.connections,
                read_bytes=0,
                write_bytes=0,
            )

    def map(self, lease: int, slab: int = 0) -> MappedSlot | None:
        """Moves a free slab into an empty slot."""
        with self._lock:
            entry = self._find(lease)
            slot = next((n for n in range(entry.slots_max) if n not in entry.slots), None)
            if slot is None:
                raise EngineError("no empty slot", code=errno.ENOSPC)
            if not self._free:
                return None
            self._free -= 1
            entry.slots[slot] = self._next_generation
            self._next_generation += 1
            return MappedSlot(slot, entry.slots[slot])

    def unmap(self, lease: int, slot: int, generation: int, wait_ms_max: int) -> None:
        """Empties a slot; its slab becomes dirty."""
        with self._lock:
            entry = self._find(lease)
            if entry.slots.get(slot) != generation:
                raise EngineError("another generation", code=errno.ESTALE)
            del entry.slots[slot]
            self._dirty += 1

    def rdma_open(
        self, lease: int, peers: Sequence[RdmaEnd], scope: int = 0
    ) -> tuple[Sequence[RdmaEnd], RdmaKey]:
        """Ends that mirror the peers', or none where the host has no RDMA."""
        with self._lock:
            entry = self._find(lease)
            if not self.has_rdma:
                raise EngineError("no RDMA: this host has no RDMA device", code=errno.ENODEV)
            entry.rdma = True
            self.rdma_scope = scope
            return list(peers), RdmaKey(4096, 1)

    @property
    def rdma_registered(self) -> set[int]:
        """The slabs that are, by generation."""
        with self._lock:
            return set(self._registered)

    def rdma_close(self, lease: int) -> None:
        """Ends the connections and the keys."""
        with self._lock:
            entry = self._find(lease)
            entry.rdma = False
            self._registered.difference_update(entry.slots.values())

    def rdma_pause(self, lease: int) -> None:
        """Ends the connections."""
        with self._lock:
            self._find(lease).rdma = False

    def rdma_key(self, lease: int, slot: int, generation: int, *, at_hand: bool = False) -> RdmaKey:
        """A key, while there is memory to register."""
        with self._lock:
            entry = self._find(lease)
            if not entry.rdma:
                raise EngineError("no connections", code=errno.ENOTCONN)
            if entry.slots.get(slot) != generation:
                raise EngineError("another generation", code=errno.ESTALE)
            if generation not in self._registered:
                if at_hand:
                    raise EngineError("not registered yet", code=errno.EAGAIN)
                if self.refuse_registration:
                    raise EngineError("too little memory may be locked", code=errno.ENOMEM)
                self._registered.add(generation)
            return RdmaKey(4096 * (slot + 1), generation)

    def rdma_ahead(self) -> bool:
        """Registers one mapped slab; free ones are, here."""
        with self._lock:
            if not self.has_rdma:
                raise EngineError("no RDMA: this host has no RDMA device", code=errno.ENODEV)
            for entry in self._leases.values():
                for generation in entry.slots.values():
                    if generation not in self._registered:
                        self._registered.add(generation)
                        return True
            return False

    def rdma_let_go(self) -> int:
        """Everything by RDMA ends when the device is leaving."""
        with self._lock:
            if not self.rdma_is_leaving:
                return 0
            self.rdma_is_leaving = self.has_rdma = False
            for entry in self._leases.values():
                entry.rdma = False
            self._registered.clear()
            return 1

    def rdma_ahead_end(self) -> None:
        """Ends the registrations that no lease uses."""
        with self._lock:
            self._registered.clear()

    def stats(self) -> dict[str, int]:
        """As isw_store_stats."""
        with self._lock:
            leases = self._leases.values()
            return {
                "slabs_free": self._free,
                "slabs_mapped": sum(len(entry.slots) for entry in leases),
                "slabs_dirty": self._dirty,
                "slabs_unpinned": self.unpinned,
                "leases": len(leases),
                "connections": sum(entry.connections for entry in leases),
                "connections_refused": 0,
                "read_requests": 0,
                "write_requests": 0,
                "read_bytes": 0,
                "write_bytes": 0,
                "request_errors": 0,
                "protocol_errors": 0,
                "rdma_connections": 0,
                "rdma_regions": 0,
                "rdma_ahead": 0,
                "rdma_failures": 0,
            }

    def close(self) -> None:
        """Drops everything."""
        with self._lock:
            self.closed = True
            self._leases.clear()
            self._free = self._dirty = 0

    def _total(self) -> int:
        mapped = sum(len(entry.slots) for entry in self._leases.values())
        return self._free + self._dirty + mapped

    def _find(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise EngineError(f"no lease {lease}", code=errno.ENOENT)
        return self._leases[lease]
