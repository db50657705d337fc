# SPDX-License-Identifier: Apache-2.0
"""isw_store as `infiniswap.engine.protocol.Store`; threads: see `infiniswap.engine.native`."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, Self

from infiniswap.control.messages import RdmaEnd, RdmaKey
from infiniswap.engine.binding import Handle, check, ffi, lib, struct_ints, warn_unclosed
from infiniswap.engine.native_rdma import end_from_c, ends_to_c, key_from_c
from infiniswap.engine.store import LeaseStats, LeaseToken, MappedSlot, RestoredSlot, StoreConfig

_UNSAFE = ("RDMAV_ALLOW_DISASSOC_DESTROY", "MLX4_DEVICE_FATAL_CLEANUP")
"""With these libibverbs says of what a removed card still has that it has ended: no fence."""


class NativeStore:
    """isw_store: a donor's slab pool and its NBD server.

    Raises:
        EngineError: the limits make no sense or memory ran out.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._handle: Handle | None = None
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

    def _use(self) -> Any:
        assert self._handle is not None
        return self._handle.use()

    def listen(self, host: str, port: int) -> int:
        """Starts serving; returns the bound port (port 0: any free one). Any thread."""
        error = ffi.new("struct isw_error *")
        port_out = ffi.new("uint16_t *")
        with self._use() as store:
            result = lib.isw_store_listen(store, host.encode(), port, port_out, error)
        check(result, f"cannot serve pages on {host} port {port}", error)
        return int(port_out[0])

    def preallocate(self) -> None:
        """Blocking, worker thread. Adds one zeroed, pinned slab; EngineError ENOSPC when full."""
        error = ffi.new("struct isw_error *")
        with self._use() as store:
            result = lib.isw_store_preallocate(store, error)
        check(result, "cannot add a slab", error)

    def release_free(self) -> bool:
        """Blocking, worker thread. False when no slab is free."""
        with self._use() as store:
            return self._found(lib.isw_store_release_free(store), "cannot give a slab back")

    def scrub(self) -> bool:
        """Blocking, worker thread. False when no slab is dirty."""
        with self._use() as store:
            return self._found(lib.isw_store_scrub(store), "cannot zero a slab")

    def pin(self) -> bool:
        """Blocking, worker thread. False when every slab has been pinned, or cannot be."""
        with self._use() as store:
            return self._found(lib.isw_store_pin(store), "cannot pin a slab")

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

    @staticmethod
    def _found(result: int, what: str) -> bool:
        if result == -errno.ENOENT:
            return False
        check(result, what)
        return True

    def lease_create(self, slots_max: int) -> LeaseToken:
        """Any thread. A new lease of `slots_max` empty slots."""
        error = ffi.new("struct isw_error *")
        token = ffi.new("char[]", lib.ISW_TOKEN_TEXT_BYTES)
        lease = ffi.new("uint64_t *")
        with self._use() as store:
            result = lib.isw_store_lease_create(store, slots_max, token, lease, error)
        check(result, "cannot make a lease", error)
        return LeaseToken(int(lease[0]), ffi.string(token).decode())

    def lease_renew(self, lease: int, wait_ms_max: int) -> str:
        """Blocking, worker thread. EngineError ETIMEDOUT: nothing was granted."""
        token = ffi.new("char[]", lib.ISW_TOKEN_TEXT_BYTES)
        with self._use() as store:
            result = lib.isw_store_lease_renew(store, lease, wait_ms_max, token)
        check(result, f"cannot renew lease {lease}")
        text: str = ffi.string(token).decode()
        return text

    def lease_destroy(self, lease: int) -> None:
        """Blocking, worker thread."""
        with self._use() as store:
            result = lib.isw_store_lease_destroy(store, lease)
        check(result, f"cannot end lease {lease}")

    def lease_stats(self, lease: int) -> LeaseStats:
        """Any thread, never waits."""
        stats = ffi.new("struct isw_lease_stats *")
        with self._use() as store:
            result = lib.isw_store_lease_stats(store, lease, stats)
        check(result, f"no figures of lease {lease}")
        return LeaseStats(**struct_ints(stats[0]))

    def map(self, lease: int, slab: int = 0) -> MappedSlot | None:
        """Any thread. None when no slab is free; `slab` is kept with it, see lease_restore.

        EngineError ENOSPC when no slot is empty, EAGAIN when those that are wait for old
        connections to end.
        """
        slot = ffi.new("uint32_t *")
        generation = ffi.new("uint64_t *")
        with self._use() as store:
            result = lib.isw_store_map(store, lease, slab, slot, generation)
        if result == -errno.ENOENT:
            return None
        check(result, f"cannot map a slab into lease {lease}")
        return MappedSlot(int(slot[0]), int(generation[0]))

    def unmap(self, lease: int, slot: int, generation: int, wait_ms_max: int) -> None:
        """Blocking, worker thread. EngineError ESTALE: the slot holds another generation."""
        with self._use() as store:
            result = lib.isw_store_unmap(store, lease, slot, generation, wait_ms_max)
        check(result, f"cannot unmap slot {slot} of lease {lease}")

    def rdma_open(self, lease: int, peers: Sequence[RdmaEnd]) -> tuple[Sequence[RdmaEnd], RdmaKey]:
        """Blocking, worker thread. EngineError: there can be no RDMA, and why."""
        error = ffi.new("struct isw_error *")
        ends = ffi.new("struct isw_rdma_end[]", max(1, len(peers)))
        probe = ffi.new("struct isw_rdma_key *")
        with self._use() as store:
            result = lib.isw_store_rdma_open(
                store, lease, ends_to_c(peers), len(peers), ends, probe, error
            )
        check(result, "no RDMA", error)
        return [end_from_c(ends[i]) for i in range(len(peers))], key_from_c(probe)

    def rdma_close(self, lease: int) -> None:
        """Blocking, worker thread."""
        with self._use() as store:
            result = lib.isw_store_rdma_close(store, lease)
        check(result, f"cannot end the RDMA connections of lease {lease}")

    def rdma_pause(self, lease: int) -> None:
        """Blocking, worker thread. Ends the connections; what is registered stays so."""
        with self._use() as store:
            result = lib.isw_store_rdma_pause(store, lease)
        check(result, f"cannot end the RDMA connections of lease {lease}")

    def rdma_key(self, lease: int, slot: int, generation: int, *, at_hand: bool = False) -> RdmaKey:
        """Blocking, worker thread. EngineError ENOTCONN, ESTALE, ENOMEM, EAGAIN, ..."""
        error = ffi.new("struct isw_error *")
        key = ffi.new("struct isw_rdma_key *")
        with self._use() as store:
            result = lib.isw_store_rdma_key(store, lease, slot, generation, at_hand, key, error)
        check(result, f"slot {slot} cannot be reached by RDMA", error)
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

    def close(self) -> None:
        """Blocking, worker thread, idempotent. Closes every connection, frees every slab that
        lies in no file."""
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and not handle.closed and not sys.is_finalizing():
            warn_unclosed(self)
            self.close()
