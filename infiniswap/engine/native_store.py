# SPDX-License-Identifier: Apache-2.0
"""isw_store as `infiniswap.engine.protocol.Store`; threads: see `infiniswap.engine.native`."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from typing import Any

from infiniswap.engine.binding import Handle, HandleOwner, check, ffi, lib, struct_ints
from infiniswap.engine.native_rdma import end_from_c, ends_to_c, key_from_c
from infiniswap.engine.store import LeaseStats, MappedSlot, RestoredSlot, StoreConfig
from infiniswap.rdma_address import RdmaEnd, RdmaKey

_UNSAFE = ("RDMAV_ALLOW_DISASSOC_DESTROY", "MLX4_DEVICE_FATAL_CLEANUP")
"""With these libibverbs says of what a removed card still has that it has ended: no fence."""


class NativeStore(HandleOwner):
    """isw_store: a donor's slab pool and its NBD server. close() ends every connection and frees
    every slab that lies in no file.

    Raises:
        EngineError: the limits make no sense or memory ran out.
    """

    def __init__(self, config: StoreConfig) -> None:
        for name in _UNSAFE:
            os.environ.pop(name, None)
        error = ffi.new("struct isw_error *")
        out = ffi.new("isw_store **")
        slab_dir = ffi.NULL
        if config.slab_dir is not None:
            slab_dir = ffi.new("char[]", os.fsencode(config.slab_dir))
        fields = {**dataclasses.asdict(config), "slab_dir": slab_dir}
        c_config = ffi.new("struct isw_store_config *", fields)
        check(lib.isw_store_create(c_config, out, error), "cannot create the slab store", error)
        self._handle = Handle("slab store", out[0], lib.isw_store_destroy)

    def listen(self, host: str, port: int) -> int:
        """Starts serving; returns the bound port (port 0: any free one). Any thread."""
        port_out = ffi.new("uint16_t *")
        what = f"cannot serve pages on {host} port {port}"
        self._explained(what, lib.isw_store_listen, host.encode(), port, port_out)
        return int(port_out[0])

    def preallocate(self) -> None:
        """Blocking, worker thread. Adds one zeroed, pinned slab; EngineError ENOSPC when full."""
        self._explained("cannot add a slab", lib.isw_store_preallocate)

    def release_free(self) -> bool:
        """Blocking, worker thread. False when no slab is free."""
        return self._found("cannot give a slab back", lib.isw_store_release_free)

    def scrub(self) -> bool:
        """Blocking, worker thread. False when no slab is dirty."""
        return self._found("cannot zero a slab", lib.isw_store_scrub)

    def pin(self) -> bool:
        """Blocking, worker thread. False when every slab has been pinned, or cannot be."""
        return self._found("cannot pin a slab", lib.isw_store_pin)

    def notes(self) -> list[str]:
        """Any thread. What was found in the directory of slabs and removed, and why."""
        note = ffi.new("struct isw_error *")
        texts: list[str] = []
        with self._use() as store:
            while lib.isw_store_note(store, len(texts), note) == 0:
                texts.append(ffi.string(note.text).decode(errors="replace"))
        return texts

    def lease_restore(self, lease: int, slots_max: int, epoch: int) -> list[RestoredSlot]:
        """Any thread. EngineError: no such number was given out, or too many leases."""
        info, slots = ffi.new("struct isw_slot_info *"), []
        with self._use() as store:
            result = lib.isw_store_lease_restore(store, lease, slots_max, epoch)
            check(result, f"cannot restore lease {lease}")
            after = 0
            while lib.isw_store_lease_slot(store, lease, after, info) == 0:
                slots.append(RestoredSlot(int(info.slot), int(info.generation), int(info.tag)))
                after = int(info.slot) + 1
        return slots

    def restored(self) -> None:
        """Any thread. Slabs of leases that were not restored become dirty."""
        with self._use() as store:
            lib.isw_store_restored(store)

    def _found(self, what: str, function: Any, *args: Any) -> bool:
        with self._use() as store:
            result: int = function(store, *args)
        return result != -errno.ENOENT and check(result, what) >= 0

    def lease_create(self, slots_max: int) -> int:
        """Any thread. A new lease of `slots_max` empty slots."""
        lease = ffi.new("uint64_t *")
        self._explained("cannot make a lease", lib.isw_store_lease_create, slots_max, lease)
        return int(lease[0])

    def lease_renew(self, lease: int, wait_ms_max: int) -> None:
        """Blocking, worker thread. EngineError ETIMEDOUT: connections have not ended."""
        self._call(f"cannot renew lease {lease}", lib.isw_store_lease_renew, lease, wait_ms_max)

    def ticket(
        self, lease: int, number: int, *, uses: int = 1, good_ms: int = 0, wait_ms_max: int = 0
    ) -> str:
        """Blocking, worker thread. EngineError ETIMEDOUT, EBUSY: there is no ticket."""
        fields = {"number": number, "uses": uses, "good_ms": good_ms, "wait_ms_max": wait_ms_max}
        config = ffi.new("struct isw_ticket_config *", fields)
        ticket = ffi.new("char[]", lib.ISW_TICKET_TEXT_BYTES)
        what = f"cannot give a ticket for connection {number} of lease {lease}"
        self._call(what, lib.isw_store_ticket, lease, config, ticket)
        text: str = ffi.string(ticket).decode()
        return text

    def ticket_end(self, lease: int, number: int) -> None:
        """Any thread, never waits."""
        self._call(f"cannot end a ticket of lease {lease}", lib.isw_store_ticket_end, lease, number)

    def lease_destroy(self, lease: int) -> None:
        """Blocking, worker thread."""
        self._call(f"cannot end lease {lease}", lib.isw_store_lease_destroy, lease)

    def lease_stats(self, lease: int) -> LeaseStats:
        """Any thread, never waits."""
        stats = ffi.new("struct isw_lease_stats *")
        self._call(f"no figures of lease {lease}", lib.isw_store_lease_stats, lease, stats)
        return LeaseStats(**struct_ints(stats[0]))

    def map(self, lease: int, slab: int = 0) -> MappedSlot | None:
        """Any thread. None when no slab is free; `slab` is kept with it, see lease_restore.

        EngineError ENOSPC when no slot is empty, EAGAIN when those that are wait for old
        connections to end.
        """
        slot, generation = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        what = f"cannot map a slab into lease {lease}"
        if not self._found(what, lib.isw_store_map, lease, slab, slot, generation):
            return None
        return MappedSlot(int(slot[0]), int(generation[0]))

    def unmap(self, lease: int, slot: int, generation: int, wait_ms_max: int) -> None:
        """Blocking, worker thread. EngineError ESTALE: the slot holds another generation."""
        what = f"cannot unmap slot {slot} of lease {lease}"
        self._call(what, lib.isw_store_unmap, lease, slot, generation, wait_ms_max)

    def rdma_open(
        self, lease: int, peers: Sequence[RdmaEnd], scope: int = 0
    ) -> tuple[Sequence[RdmaEnd], RdmaKey]:
        """Blocking, worker thread. EngineError: there can be no RDMA, and why."""
        ends = ffi.new("struct isw_rdma_end[]", max(1, len(peers)))
        probe = ffi.new("struct isw_rdma_key *")
        what = "no RDMA"
        self._explained(
            what, lib.isw_store_rdma_open, lease, ends_to_c(peers, scope), len(peers), ends, probe
        )
        return [end_from_c(ends[i]) for i in range(len(peers))], key_from_c(probe)

    def rdma_close(self, lease: int) -> None:
        """Blocking, worker thread."""
        what = f"cannot end the RDMA connections of lease {lease}"
        self._call(what, lib.isw_store_rdma_close, lease)

    def rdma_pause(self, lease: int) -> None:
        """Blocking, worker thread. Ends the connections; what is registered stays so."""
        what = f"cannot end the RDMA connections of lease {lease}"
        self._call(what, lib.isw_store_rdma_pause, lease)

    def rdma_key(self, lease: int, slot: int, generation: int, *, at_hand: bool = False) -> RdmaKey:
        """Blocking, worker thread. EngineError ENOTCONN, ESTALE, ENOMEM, EAGAIN, ..."""
        key = ffi.new("struct isw_rdma_key *")
        what = f"slot {slot} cannot be reached by RDMA"
        self._explained(what, lib.isw_store_rdma_key, lease, slot, generation, at_hand, key)
        return key_from_c(key)

    def rdma_ahead(self) -> bool:
        """Blocking, worker thread. EngineError: no device, or it refuses."""
        error = ffi.new("struct isw_error *")
        with self._use() as store:
            result = lib.isw_store_rdma_ahead(store, error)
        if result == -errno.ENOENT and not error.code:
            return False
        check(result, "no slab is registered ahead", error)
        return True

    def rdma_let_go(self) -> int:
        """Blocking, worker thread. How many devices are being removed, since this call."""
        with self._use() as store:
            return int(lib.isw_store_rdma_let_go(store))

    def rdma_ahead_end(self) -> None:
        """Blocking, worker thread."""
        with self._use() as store:
            lib.isw_store_rdma_ahead_end(store)

    def stats(self) -> dict[str, int]:
        """Any thread, never waits."""
        stats = ffi.new("struct isw_store_stats *")
        with self._use() as store:
            lib.isw_store_stats(store, stats)
        return struct_ints(stats[0])
