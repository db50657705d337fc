# SPDX-License-Identifier: Apache-2.0
"""A donor's store alone, without a daemon: for tests that speak NBD to it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from infiniswap.engine.store import MappedSlot, Store, StoreConfig
from infiniswap.units import MIB

MANY = 1 << 20
"""Uses of a ticket whose number of connections is of no interest."""

WAIT_S = 60.0
"""Bound of every wait for an answer; never reached on success."""


@dataclass(slots=True)
class LentStore:
    """A store with one lease; all but its last slot are mapped. The ticket opens any number of
    connections."""

    store: Store
    slab_bytes: int
    slots: int
    port: int
    lease: int
    ticket: str
    mapped: list[MappedSlot] = field(default_factory=list)

    @property
    def uri(self) -> str:
        return f"nbd://127.0.0.1:{self.port}/{self.ticket}"

    @property
    def size_bytes(self) -> int:
        """Of the part that is mapped: the slots from 0 on."""
        return self.slab_bytes * len(self.mapped)

    def dial(self, host: str = "127.0.0.1") -> socket.socket:
        """A connection without a word said, from that address of the loopback."""
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S, (host, 0))


class Limits(TypedDict, total=False):
    """Of StoreConfig, what tests change."""

    handshake_ms_max: int
    send_ms_max: int
    connections_max: int
    connections_per_host_max: int


@contextlib.contextmanager
def lent_store(
    *,
    slab_bytes: int = 8 * MIB,
    slots: int = 5,
    slabs_max: int = 0,
    **limits: Unpack[Limits],
) -> Iterator[LentStore]:
    """Runs a store on a free port of the loopback, with `slots` - 1 slabs in it.

    Args:
        slabs_max: 0: no more than these.
        limits: other fields of StoreConfig.
    """
    from infiniswap.engine.native import NativeStore

    patient: Limits = {"handshake_ms_max": 60_000, **limits}
    store = NativeStore(StoreConfig(slab_bytes, slabs_max or slots - 1, leases_max=4, **patient))
    try:
        for _ in range(slots - 1):
            store.preallocate()
        port = store.listen("127.0.0.1", 0)
        lease = store.lease_create(slots)
        ticket = store.ticket(lease, 0, uses=MANY)
        lent = LentStore(store, slab_bytes, slots, port, lease, ticket)
        for slab in range(slots - 1):
            mapped = store.map(lease, slab)
            assert mapped is not None
            lent.mapped.append(mapped)
        assert [mapped.slot for mapped in lent.mapped] == list(range(slots - 1))
        yield lent
    finally:
        store.close()
