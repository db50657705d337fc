# SPDX-License-Identifier: Apache-2.0
"""The donor's store as the rest of the package knows it: a typed protocol and plain records.

`infiniswap.engine.native_store` implements it on the C extension, `infiniswap.testing.store` in
memory. Blocking methods and errors: see `infiniswap.engine.protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from infiniswap.rdma_address import RdmaEnd, RdmaKey

TICKET_NUMBERS: Final = 33
"""Tickets of a lease at the same time (ISW_TICKET_NUMBERS)."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Limits of a donor store. Defaults are generous for a host of one device per consumer."""

    slab_bytes: int
    slabs_max: int
    leases_max: int = 256
    connections_max: int = 1024
    connections_per_lease_max: int = 32
    connections_per_host_max: int = 128
    handshake_ms_max: int = 2_000
    send_ms_max: int = 30_000
    slab_dir: str | None = None
    """A tmpfs that keeps slabs when the process is gone; None: they end with it."""


@dataclass(frozen=True, slots=True)
class MappedSlot:
    """A slab put into a lease's slot; the generation names this use of the slot."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slab that was found in its slot."""

    slot: int
    generation: int
    slab: int


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Counters of one lease."""

    epoch: int
    slots_max: int
    slots_mapped: int
    connections: int
    read_bytes: int
    write_bytes: int
    rdma_connections: int = 0


class Store(Protocol):
    """The donor's slab pool and its NBD server (isw_store)."""

    def listen(self, host: str, port: int) -> int: ...
    def preallocate(self) -> None:
        """Blocking. Adds one zeroed, pinned slab to the free pool."""

    def release_free(self) -> bool:
        """Blocking. Gives a dirty slab, else a free one, back to the host. False: there is none."""

    def scrub(self) -> bool:
        """Blocking. Zeroes one dirty slab and adds it to the free pool. False: there is none."""

    def pin(self) -> bool:
        """Blocking. Pins one slab that a predecessor left. False: all are pinned."""

    def notes(self) -> Sequence[str]:
        """What the store removed from the directory of slabs, and why."""

    def lease_restore(self, lease: int, slots_max: int, epoch: int) -> Sequence[RestoredSlot]:
        """Restores a predecessor's lease, and returns its slabs that were found. The lease has to
        be renewed before it is used."""

    def restored(self) -> None:
        """Ends the restoring: slabs of leases that were not restored become dirty."""

    def lease_create(self, slots_max: int) -> int:
        """Returns the number of a new lease, whose slots are empty."""

    def lease_renew(self, lease: int, wait_ms_max: int) -> None:
        """Blocking. Fences the old connections; every ticket is dead."""

    def ticket(
        self, lease: int, number: int, *, uses: int = 1, good_ms: int = 0, wait_ms_max: int = 0
    ) -> str:
        """Blocking. Returns a ticket (128 bits, hex): the name of the export for whoever opens the
        connection of that number.

        The earlier ticket of that number is dead. Connections that it has opened are ended, and
        awaited. `good_ms` 0: until it is used up, replaced or ended. EngineError ETIMEDOUT: they
        have not ended in time. EBUSY: the lease is being renewed, or has to be.
        """

    def ticket_end(self, lease: int, number: int) -> None:
        """Ends a ticket and the connections that it has opened. Does not wait."""

    def lease_destroy(self, lease: int) -> None:
        """Blocking. Fences and releases every slot."""

    def lease_stats(self, lease: int) -> LeaseStats: ...
    def map(self, lease: int, slab: int) -> MappedSlot | None:
        """Puts a free slab into an empty slot; None when no slab is free.

        `slab` is the device's own number, which the store keeps with the slot.

        EngineError EAGAIN: the empty slots were taken by force. They stay empty until the lease's
        old connections have ended.
        """

    def unmap(self, lease: int, slot: int, generation: int, wait_ms_max: int) -> None:
        """Blocking. Fences the slot and waits for the requests that hold it. With 0 it takes the
        slot by force."""

    def rdma_open(
        self, lease: int, peers: Sequence[RdmaEnd], scope: int = 0
    ) -> tuple[Sequence[RdmaEnd], RdmaKey]:
        """Blocking. Makes RDMA connections to these ends, which last until the lease is renewed.
        `scope`: index of the interface that leads to link-local ones.
        Returns our ends, and a page that the peer can read. EngineError: why there can be none."""

    def rdma_close(self, lease: int) -> None:
        """Blocking. Ends the lease's RDMA connections and every key. If it had any, its TCP
        connections end, too."""

    def rdma_pause(self, lease: int) -> None:
        """Blocking. Ends the lease's RDMA connections. Slabs stay registered for the next ones."""

    def rdma_key(self, lease: int, slot: int, generation: int, *, at_hand: bool = False) -> RdmaKey:
        """Blocking. Registers the slab of a mapped slot until it is unmapped. EngineError ENOTCONN:
        the lease has no RDMA connections. ESTALE: another generation. EAGAIN, with `at_hand`:
        registering would take a while. Others: the host or its device refuses."""

    def rdma_ahead(self) -> bool:
        """Blocking. Registers one slab for the next lease that needs one. False: all are
        registered. EngineError: this host has no RDMA, or its device refuses."""

    def rdma_let_go(self) -> int:
        """Blocking. Ends what uses RDMA devices that the host is removing; returns how many such
        devices this call has found."""

    def rdma_ahead_end(self) -> None:
        """Blocking. Ends the registrations that no lease uses."""

    def stats(self) -> dict[str, int]:
        """Every field of struct isw_store_stats by name."""

    def close(self) -> None:
        """Blocking, idempotent."""
