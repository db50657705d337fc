# SPDX-License-Identifier: Apache-2.0
"""One donor, as a device knows it.

    idle ──map──▶ mapped ──connections or session lost──▶ suspended ──back in time──▶ mapped
     ▲                │ last slab given back                  │ not back in time, or another
     └────────────────┴───────────────◀───────────────────────┘ incarnation: given up

A link is made of its session, its connections and lease, the slabs mapped there, and its recovery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial

from infiniswap.control.channel import Ended
from infiniswap.control.client import Session
from infiniswap.control.messages import DeviceFigures
from infiniswap.device.donors.connections import Connections
from infiniswap.device.donors.link_types import LinkConfig, SlabKeeper
from infiniswap.device.donors.mapped import MappedSlabs
from infiniswap.device.donors.recovery import Recovery
from infiniswap.device.donors.session import DonorSession
from infiniswap.device.off_loop import run_to_end
from infiniswap.engine.protocol import Engine
from infiniswap.errors import InfiniswapError, NoDonorError
from infiniswap.policy.donor_faults import DonorFaults
from infiniswap.policy.placement import MemoryUse
from infiniswap.units import HostPort

log = logging.getLogger(__name__)


class DonorLink:
    """One donor. Everything runs on the event loop; blocking engine calls go to `executor`.

    Attributes:
        address: of the donor.
        is_listed: whether it is still among the known donors; otherwise it gets no more slabs.
        session, connections, slabs, recovery: its parts, some of whose methods are its own.
    """

    def __init__(
        self,
        address: HostPort,
        engine: Engine,
        keeper: SlabKeeper,
        config: LinkConfig,
        executor: Executor,
    ) -> None:
        self.address = address
        self.is_listed = True
        self._lock = asyncio.Lock()  # session, lease and remote change under it
        faults = DonorFaults()
        self.session = DonorSession(address, self)
        self.connections = Connections(address, engine, config, partial(run_to_end, executor))
        self.slabs = MappedSlabs(self, engine, keeper, faults)
        self.recovery = Recovery(self, engine, keeper, faults, self._lock)
        self.mapped = self.slabs.places
        self.unmap, self.keep = self.slabs.unmap, self.slabs.keep
        self.inherit, self.settled = self.recovery.inherit, self.recovery.settled
        self.connections_down = self.recovery.connections_down
        self.bad_page, self.refused = self.recovery.bad_page, self.recovery.refused

    @property
    def name(self) -> str:
        """Of the donor; empty before it has answered."""
        return self.session.name

    @property
    def remote(self) -> int | None:
        """The engine's number of the donor."""
        return self.connections.remote

    @property
    def config(self) -> LinkConfig:
        """What the link knows of the device."""
        return self.connections.config

    @property
    def detail(self) -> str:
        """What is wrong with the donor, for tables; empty: nothing."""
        return self.recovery.detail

    @detail.setter
    def detail(self, detail: str) -> None:
        self.recovery.detail = detail

    @property
    def state(self) -> str:
        """For tables: idle, mapped, suspended. Without a session alone pages still flow."""
        if self.recovery.is_suspended:
            return "suspended"
        return "mapped" if self.mapped else "idle"

    @property
    def is_usable(self) -> bool:
        """Whether a slab may be placed here now."""
        # Without a session nothing would say that the drain is over, so the donor is asked.
        draining = self.session.is_draining and self.session.is_open
        return not (self.recovery.is_under_way or draining or self.connections.is_closing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be missed if there were no such link."""
        return (
            self.connections.lease is None
            and self.session.current is None
            and not self.recovery.is_under_way
            and not self.mapped
            and not self._lock.locked()
        )

    def _check_usable(self) -> None:
        if not self.is_usable:
            raise NoDonorError("it is being recovered", where=f"donor {self.address}")

    async def open(self) -> Session:
        """The session, opened unless it is open already.

        Raises:
            InfiniswapError: there is none.
        """
        self._check_usable()  # a recovery holds the lock for as long as it takes
        async with self._lock:
            self._check_usable()
            return await self.session.open(self.connections.config, self.connections.lease)

    async def ask(self, *, ahead: bool = False) -> MemoryUse:
        """The donor's memory use, now. A mapping ahead may use free slabs only, and none at a donor
        that does not know such mappings.

        Raises:
            InfiniswapError: it could not be asked.
        """
        session = await self.open()
        answer = await session.memory()
        can_map = 0 if self.session.is_draining else answer.can_map
        if ahead:
            can_map = min(can_map, answer.free_slabs) if session.welcome.maps_ahead else 0
        return MemoryUse(answer.used_share, can_map, answer.no_room)

    async def let_go(self) -> None:
        """Ends a session that was opened only to ask."""
        if self.recovery.is_under_way:
            return
        async with self._lock:
            if self.connections.lease is None and not self.recovery.is_under_way:
                await self.session.close()

    async def map(self, slab: int, *, migrates: bool = False, ahead: bool = False) -> None:
        """Puts a slab there and tells the engine. A slab that migrates stays where it is as well.
        A donor evicts a slab mapped `ahead` of need before all others.

        Raises:
            InfiniswapError: refused, or unreachable. Nothing has changed then.
        """
        self._check_usable()
        async with self._lock:
            self._check_usable()
            session = await self.session.open(self.connections.config, self.connections.lease)
            if ahead and not session.welcome.maps_ahead:  # not the daemon that was asked
                raise NoDonorError("it maps nothing ahead", where=f"donor {self.address}")
            if self.connections.remote is None:
                await self.connections.open(session)
                self.recovery.search.connected()
                by = self.connections.transport.name
                log.info("donor %s: connected (%s, %s)", self.address, self.name, by)
            await self.slabs.map(session, slab, migrates=migrates, ahead=ahead)

    # ----------------------------------------------- what the donor asks (SessionHandler)

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        """See SessionHandler and MappedSlabs."""
        if self._is_ours(lease):
            await self.slabs.evict(slot, generation, deadline_s, move_s, last_copy=last_copy)

    async def activity(self, lease: int) -> Mapping[int, float]:
        """See SessionHandler."""
        return self.slabs.activity() if self._is_ours(lease) else {}

    def figures(self) -> DeviceFigures | None:
        """See SessionHandler."""
        return self.connections.config.figures()

    def _is_ours(self, lease: int) -> bool:
        ours = self.connections.lease
        return ours is not None and ours.lease == lease

    def draining(self, draining: bool) -> None:
        """See SessionHandler."""
        self.session.is_draining = draining

    def ended(self, ended: Ended) -> None:
        """See SessionHandler."""
        self.recovery.session_ended(ended)

    async def close(self) -> None:
        """Gives everything back, in bounded time. Front ends are gone by now."""
        self.connections.is_closing = True
        await self.recovery.close()
        async with self._lock:
            for slab in list(self.mapped):
                with contextlib.suppress(InfiniswapError, TimeoutError):
                    await self.slabs.abandon(slab)
            await self.session.close(self.connections.lease)
            self.connections.lease = None
