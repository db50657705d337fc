# SPDX-License-Identifier: Apache-2.0
"""A donor's store as a process of its own, without the daemon around it: one lease with every slot
mapped, over TCP and over RDMA.

    python -m isw_bench.rdma.donor --host ADDRESS --slots N --slab-bytes N

Prints {"port": ..., "ticket": ...}. For each input line with a consumer's ends it replaces the
former connections by new ones, and prints its answer (tools/bench/c/rdma_session.h).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import msgspec

from infiniswap.engine.native import NativeStore
from infiniswap.engine.store import MappedSlot, StoreConfig
from infiniswap.rdma_address import RdmaEnd, RdmaKey


class Ends(msgspec.Struct, frozen=True):
    """What a consumer tells."""

    ends: list[RdmaEnd]


def words(ends: Sequence[RdmaEnd], keys: Sequence[RdmaKey]) -> str:
    """The answer."""
    told: list[object] = []
    for end in ends:
        told += [end.gid, end.link, end.lid, end.mtu_bytes, end.reads_max, end.number, end.psn]
    for key in keys:
        told += [key.address, key.rkey]
    return " ".join(map(str, told))


def mapped_slots(store: NativeStore, lease: int, count: int) -> list[MappedSlot]:
    """All slots of the lease, in their order.

    Raises:
        AssertionError: the store has fewer slabs.
    """
    found = [store.map(lease, number) for number in range(count)]
    slots = [slot for slot in found if slot is not None]
    assert [slot.slot for slot in slots] == list(range(count))
    return slots


def main() -> int:
    """Serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--slab-bytes", type=int, required=True)
    args = parser.parse_args()
    with NativeStore(StoreConfig(args.slab_bytes, args.slots)) as store:
        for _ in range(args.slots):
            store.preallocate()
        port = store.listen(args.host, 0)
        lease = store.lease_create(args.slots)
        slots = mapped_slots(store, lease, args.slots)
        ticket = store.ticket(lease, 0, uses=1 << 20)
        print(json.dumps({"port": port, "ticket": ticket}), flush=True)
        for line in sys.stdin:
            peers = msgspec.json.decode(line, type=Ends).ends
            ends, probe = store.rdma_open(lease, peers)
            keys = [store.rdma_key(lease, slot.slot, slot.generation) for slot in slots]
            print(words(ends, [probe, *keys]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
