# SPDX-License-Identifier: Apache-2.0
"""A donor's RDMA: connections for a lease that asks for them, and a key for each of its slabs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import ClassVar

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.peer import host_of
from infiniswap.control.service import ServerSession
from infiniswap.donor.leases import GrantedLease, LeaseTable
from infiniswap.engine.protocol import OffLoop
from infiniswap.engine.store import Store
from infiniswap.errors import EngineError, RequestRefusedError
from infiniswap.rdma_address import RdmaKey
from infiniswap.ticks import next_tick

log = logging.getLogger(__name__)

_FENCE_MS = 1_000
"""For a slab that no consumer knows yet."""

_PATIENCE_S = 0.5
"""How long an answer waits for slabs to be registered. A consumer gives its lease up when it is not
back after two seconds; over TCP it is back at once, and asks again for RDMA."""

_LOOK_S = 1.0
_VERBS_S_MAX = 2.0
_REFUSED_LOOKS = 30
"""Checks without another attempt after the host or its device refused to register a slab ahead, or
a device was removed."""


class DonorRdma:
    """RDMA connections of leases; a DonorTransport. Requests of one lease come one after the other.

    Args:
        store: slab pool.
        table: leases.
        off_loop: for what blocks.
        counters: rdma_opened, rdma_refused, rdma_unregistered, rdma_registered_ahead.
        enabled: whether RDMA is offered at all.
        patience_s: what an answer waits for registrations, in seconds.
    """

    name: ClassVar = "rdma"

    def __init__(
        self,
        store: Store,
        table: LeaseTable,
        off_loop: OffLoop,
        counters: Counter[str],
        enabled: bool,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._store = store
        self._table = table
        self._off_loop = off_loop
        self.counters = counters
        self.enabled = enabled
        self._patience_s = patience_s
        self._told = ""
        self._is_used = False  # there was something to let go of
        self._asked: asyncio.Future[bool] | None = None

    async def is_usable(self) -> bool:
        """Whether this host has a usable port now; False while its driver has not answered.

        A driver that hangs is asked again only after it has answered, because each question takes
        one of the process's few threads.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().run_in_executor(None, _has_usable_port)
        await asyncio.wait({self._asked}, timeout=_VERBS_S_MAX)
        return self._asked.done() and self._asked.result()

    async def keep_ready(
        self,
        background: Executor,
        sleep: Callable[[float], Awaitable[None]] = next_tick,
    ) -> None:
        """Registers the pool's slabs one by one before a consumer needs them; until cancelled.
        Closes all RDMA connections when RDMA is switched off, and when its device is removed."""
        in_background = partial(asyncio.get_running_loop().run_in_executor, background)
        is_on, looks_off = False, 0
        while True:
            try:
                if is_on and not self.enabled:
                    await self._end()
                    await in_background(self._store.rdma_ahead_end)
                    log.info("RDMA was switched off: no slab is registered now")
                is_on = self.enabled
                if self._is_used and await self._off_loop(self._store.rdma_let_go) > 0:
                    log.warning(
                        "an RDMA device is being removed: consumers come back over TCP",
                        extra=events.about(events.RDMA_REMOVED),
                    )
                    looks_off = _REFUSED_LOOKS
                if is_on and not looks_off and await in_background(self._store.rdma_ahead):
                    self._is_used = True
                    self.counters["rdma_registered_ahead"] += 1
                    continue
                looks_off = max(0, looks_off - 1)
            except EngineError as error:
                looks_off = _REFUSED_LOOKS
                if error.what != self._told and error.code == errno.ENOMEM:
                    log.warning("%s", error)
                self._told = error.what
            except Exception:
                log.exception("nothing is registered ahead now; it is tried again")
                looks_off = _REFUSED_LOOKS
            await sleep(_LOOK_S)

    async def _end(self) -> None:
        """Closes the connections of every lease; their consumers come back over TCP."""
        for lease in list(self._table.leases()):
            # The lease may have ended meanwhile.
            with contextlib.suppress(EngineError):
                await self._off_loop(partial(self._store.rdma_close, lease.lease))

    async def open(self, session: ServerSession, request: m.RdmaRequest) -> m.RdmaAnswer:
        """Connects to the consumer's ends and registers the lease's slabs. A request without ends
        closes the connections. Slabs stay registered for the next ones.

        Raises:
            RequestRefusedError: this donor cannot be reached by RDMA, and why.
        """
        lease = self._table.owned(request.lease, session.number)
        if not request.ends:
            await self._off_loop(lambda: self._store.rdma_pause(lease.lease))
            return m.RdmaAnswer(id=request.id, ends=[], probe=RdmaKey(0, 0), slots=[])
        self._check_enabled()
        self._is_used = True
        try:
            ends, probe = await self._off_loop(
                lambda: self._store.rdma_open(lease.lease, request.ends, _scope(session.address))
            )
        except EngineError as error:
            self.counters["rdma_refused"] += 1
            log.info("lease %d: not by RDMA: %s", lease.lease, error.what)
            raise RequestRefusedError(error.what, reason=m.REFUSED_NO_RDMA) from error
        if not self.enabled:  # switched off meanwhile, perhaps before this was connected
            await self._off_loop(lambda: self._store.rdma_close(lease.lease))
        self._check_enabled()
        slots = await self._keys(lease)
        self.counters["rdma_opened"] += 1
        log.info(
            "lease %d: %d connections by RDMA, %d of %d slabs registered",
            lease.lease,
            len(ends),
            len(slots),
            len(lease.slots),
        )
        return m.RdmaAnswer(id=request.id, ends=list(ends), probe=probe, slots=slots)

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise RequestRefusedError("RDMA is switched off here", reason=m.REFUSED_NO_RDMA)

    async def _keys(self, lease: GrantedLease) -> list[m.SlotKey]:
        """The keys of every slab that can be registered."""
        keys, rest = [], []
        for info in list(lease.slots.values()):
            try:
                key = await self._key(lease.lease, info, at_hand=True)
            except RequestRefusedError:
                rest.append(info)
            else:
                keys.append((info, key))
        time_s = asyncio.get_running_loop().time
        until_s = time_s() + self._patience_s
        for done, info in enumerate(rest):
            if time_s() >= until_s:
                # Slabs registered by now stay so.
                await self._off_loop(lambda: self._store.rdma_pause(lease.lease))
                self.counters["rdma_refused"] += 1
                raise RequestRefusedError(
                    f"{len(rest) - done} of {len(lease.slots)} slabs are still being registered",
                    reason=m.REFUSED_NO_RDMA,
                )
            # Other slabs are counted and logged; the consumer sees that they are missing.
            with contextlib.suppress(RequestRefusedError):
                keys.append((info, await self._key(lease.lease, info)))
        return [m.SlotKey(info.slot, info.generation, key) for info, key in keys if key is not None]

    async def map_answer(self, number: int, lease: int, slot: m.SlotInfo) -> m.MapAnswer:
        """The answer to request `number`: the slab is in that slot.

        Raises:
            RequestRefusedError: it cannot be registered, and is in the pool again. Other slabs,
                which were registered, stay lent.
        """
        try:
            key = await self._key(lease, slot)
        except RequestRefusedError:
            # An eviction may have taken it meanwhile.
            with contextlib.suppress(EngineError):
                await self._off_loop(
                    lambda: self._store.unmap(lease, slot.slot, slot.generation, _FENCE_MS)
                )
                self._table.unmapped(lease, slot.slot)
            raise
        return m.MapAnswer(id=number, slot=slot.slot, generation=slot.generation, key=key)

    async def _key(self, lease: int, slot: m.SlotInfo, *, at_hand: bool = False) -> RdmaKey | None:
        """None: the lease has no RDMA connections."""
        if not self.enabled:
            return None
        try:
            return await self._off_loop(
                lambda: self._store.rdma_key(lease, slot.slot, slot.generation, at_hand=at_hand)
            )
        except EngineError as error:
            if error.code == errno.ENOTCONN:
                return None
            if not at_hand:  # else it is asked for once more
                self.counters["rdma_unregistered"] += 1
                log.warning("lease %d: %s", lease, error.what)
            raise RequestRefusedError(error.what, reason=m.REFUSED_NO_MEMORY) from error


def _has_usable_port() -> bool:
    from infiniswap.engine import native_rdma  # late: it needs the extension, which a store has

    try:
        return any(port.is_usable for port in native_rdma.rdma_ports())
    except EngineError:  # there is none; `infiniswap doctor` says why
        return False


def _scope(address: str) -> int:
    """The index of the interface by which a link-local consumer is reached; else 0.

    Args:
        address: HOST:PORT of the consumer's session.
    """
    zone = host_of(address).partition("%")[2]
    try:
        return socket.if_nametoindex(zone) if zone else 0
    except OSError:
        return 0
