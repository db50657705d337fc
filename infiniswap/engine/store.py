# SPDX-License-Identifier: Apache-2.0
"""The donor's store as the rest of the package knows it: a typed protocol and plain records.

`infiniswap.engine.native_store` implements it on the C extension, `infiniswap.testing.store` in
memory. Blocking methods and errors: see `infiniswap.engine.protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infiniswap.control.messages import RdmaEnd, RdmaKey


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Limits of a donor store. Defaults are generous for a host of one device per consumer."""

    slab_bytes: int
    slabs_max: int
    leases_max: int = 256
    connections_max: int = 1024
    connections_per_lease_max: int = 32
    connections_per_host_max: int = 128
    handshake_ms_max: int = 5_000
    send_ms_max: int = 30_000
    slab_dir: str | None = None
    """A tmpfs that keeps slabs when the process is gone; None: they end with it."""


@dataclass(frozen=True, slots=True)
class LeaseToken:
    """A lease in the store: its number and the token (128 bits, hex) under which it is served."""

    lease: int
    token: str


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
        """Blocking. Gives a dirty or else a free slab back to the host; False: there is none."""

    def scrub(self) -> bool:
        """Blocking. Zeroes one dirty slab into the free pool; False when there is none."""

    def pin(self) -> bool:
        """Blocking. Pins one slab of a predecessor's; False when all have been."""

    def notes(self) -> Sequence[str]:
        """What was found in the directory of slabs and removed, and why."""

    def lease_restore(self, lease: int, slots_max: int, epoch: int) -> Sequence[RestoredSlot]:
        """A predecessor's lease with the slabs that were found. It has to be renewed."""

    def restored(self) -> None:
        """Every lease has been named: slabs of others are nobody's."""

    def lease_create(self, slots_max: int) -> LeaseToken: ...
    def lease_renew(self, lease: int, wait_ms_max: int) -> str:
        """Blocking. Fences the old connections and returns a fresh token."""

    def lease_destroy(self, lease: int) -> None:
        """Blocking. Fences and releases every slot."""

    def lease_stats(self, lease: int) -> LeaseStats: ...
    def map(self, lease: int, slab: int) -> MappedSlot | None:
        """Puts a free slab into an empty slot; None when no slab is free.

        `slab`: the device's own number, kept with it.

        EngineError EAGAIN: the empty slots were taken by force, and wait until the lease's old
        connections have ended.
        """

    def unmap(self, lease: int, slot: int, generation: int, wait_ms_max: int) -> None:
        """Blocking. Fences the slot and waits for the requests that hold it; 0: by force."""

    def rdma_open(self, lease: int, peers: Sequence[RdmaEnd]) -> tuple[Sequence[RdmaEnd], RdmaKey]:
        """Blocking. RDMA connections to these ends until the lease is renewed: ours, and a page
        that can be read there. EngineError: there can be none, and why."""

    def rdma_close(self, lease: int) -> None:
        """Blocking. Ends them, and every key; where there were any, those by TCP, too."""

    def rdma_pause(self, lease: int) -> None:
        """Blocking. Ends them; what is registered stays so for the next."""

    def rdma_key(self, lease: int, slot: int, generation: int, *, at_hand: bool = False) -> RdmaKey:
        """Blocking. Registers a mapped slot's slab, until it is unmapped. EngineError ENOTCONN:
        there are no connections; ESTALE; EAGAIN, with `at_hand`: it would take a while; else the
        host or its device refuses."""

    def rdma_ahead(self) -> bool:
        """Blocking. Registers one slab for whoever comes; False: all are. EngineError: this host
        has no RDMA, or its device refuses."""

    def rdma_let_go(self) -> int:
        """Blocking. Ends all that is by RDMA devices which the host is removing: how many go since
        this call."""

    def rdma_ahead_end(self) -> None:
        """Blocking. Ends what is registered for nobody."""

    def stats(self) -> dict[str, int]:
        """Every field of struct isw_store_stats by name."""

    def close(self) -> None:
        """Blocking, idempotent."""
