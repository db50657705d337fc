# SPDX-License-Identifier: Apache-2.0
"""A donor's store that maps its one slab again and again, for a lease with an RDMA connection.

    python -m isw_bench.rdma.map_slab --address ADDRESS --slab-bytes N --count N

Prints times in ms: `map` and `key`, the two calls behind the answer to a request for a slab, when
the slab was registered ahead; `late`, both together when it was not; `ahead`, registering it while
nobody waits; `scrub`, zeroing it for its next owner.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from infiniswap.engine.native import NativeEngine, NativeStore
from infiniswap.engine.native_rdma import NativeEngineRdma
from infiniswap.engine.protocol import EngineConfig
from infiniswap.engine.store import StoreConfig
from infiniswap.units import MIB

T = TypeVar("T")
_WAIT_MS = 60_000


class Times:
    """Lists of times in ms, by name."""

    def __init__(self) -> None:
        self.found: defaultdict[str, list[float]] = defaultdict(list)

    def of(self, name: str, call: Callable[[], T]) -> T:
        """Makes the call and keeps how long it took."""
        start_s = time.perf_counter()
        value = call()
        self.found[name].append((time.perf_counter() - start_s) * 1e3)
        return value


def turn(store: NativeStore, lease: int, times: Times, *, ahead: bool) -> None:
    """The slab is mapped, and taken back. Where the device cannot register ahead, it is late."""
    before = store.stats()["rdma_ahead"]
    if ahead:
        times.of("ahead", store.rdma_ahead)
        if store.stats()["rdma_ahead"] <= before:
            del times.found["ahead"]
            return
    once = Times()
    slot = once.of("map", lambda: store.map(lease))
    assert slot is not None
    once.of("key", lambda: store.rdma_key(lease, slot.slot, slot.generation))
    if ahead:
        for name, (took_ms,) in once.found.items():
            times.found[name].append(took_ms)
    else:
        times.found["late"].append(sum(took_ms for (took_ms,) in once.found.values()))
    store.unmap(lease, slot.slot, slot.generation, _WAIT_MS)
    times.of("scrub", store.scrub)


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--slab-bytes", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    args = parser.parse_args()
    times = Times()
    engine_config = EngineConfig(size_bytes=MIB, slab_bytes=MIB, no_backup=True, staging_pages=64)
    with (
        NativeStore(StoreConfig(args.slab_bytes, slabs_max=1)) as store,
        NativeEngine(engine_config, None) as engine,
    ):
        store.preallocate()
        lease = store.lease_create(1)
        offer = NativeEngineRdma(engine).offer(args.address, 1, 1)
        store.rdma_open(lease, offer.ends)
        for _ in range(args.count):
            turn(store, lease, times, ahead=True)
            turn(store, lease, times, ahead=False)
        store.rdma_close(lease)
        offer.close()
    print(json.dumps(times.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
