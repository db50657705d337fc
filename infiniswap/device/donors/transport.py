# SPDX-License-Identifier: Apache-2.0
"""How pages travel to one donor: by RDMA where both ends can, else by TCP, and why.

The choice is made for each new set of connections. After falling back to TCP, the device keeps
probing for RDMA in the background (infiniswap.device.donors.rdma_return), with the page that the
donor lends for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.client import Session
from infiniswap.device.donors.link_types import Lease, Place
from infiniswap.engine.protocol import Engine, OffLoop, RdmaOffer, RdmaPeer, RemoteConfig
from infiniswap.errors import (
    EngineError,
    InfiniswapError,
    RequestRefusedError,
    UnavailableError,
)
from infiniswap.units import HostPort

log = logging.getLogger(__name__)

_FLAP_S = 5.0
_FLAPS_MAX = 2
_AVOIDED_S = 60.0
_TAKE_BACK_S = 0.2
"""For an answer that is only good to know. A recovery may have to wait for it."""

RDMA = "rdma"
TCP = "tcp"


class _NoRdmaError(Exception):
    """Why RDMA cannot be used now."""


class _RefusedError(_NoRdmaError):
    """The donor said so: it has made nothing."""


class Wire:
    """The connections to one donor, as far as their kind is concerned.

    Args:
        wish: "auto", "rdma" or "tcp".
        address: of the donor, for messages.
        engine: makes the connections.
        blocking: for the engine's blocking calls.

    Attributes:
        address: of the donor.
        transport: "rdma" or "tcp" of the last connections, empty before there were any.
        reason: why not RDMA, where it was wished for; empty with it.
        fallbacks: how often RDMA was wished for and TCP was used.
        probes: how often it was tried beside that.
    """

    def __init__(self, wish: str, address: HostPort, engine: Engine, blocking: OffLoop) -> None:
        self.transport = ""
        self.reason = ""
        self.fallbacks = 0
        self.probes = 0
        self.address = address
        self._wish = wish
        self._engine = engine
        self._blocking = blocking
        self._connected_s = 0.0
        self._flaps = 0
        self._avoided_until_s = 0.0

    async def connect(
        self,
        session: Session,
        lease: Lease,
        config: RemoteConfig,
        places: set[Place],
        dial: Callable[[RemoteConfig], int],
    ) -> int:
        """Connects to a lease; `config` is how by TCP.

        Args:
            session: with the donor, which holds the lease.
            lease: as it was granted just now.
            config: host, port, token.
            places: slabs there that must be reached.
            dial: connects or reconnects in the engine, and returns the remote.

        Returns:
            The remote's number.

        Raises:
            UnavailableError: RDMA is wished for and cannot be.
            InfiniswapError: no connection at all, or the session ended.
        """
        if self._wish == TCP:
            return await self._by_tcp(config, dial, "")
        try:
            if not session.welcome.rdma:
                raise _NoRdmaError("the donor does not offer RDMA")
            if self._wish != RDMA and self._is_avoided():
                raise _NoRdmaError("its RDMA connections broke again and again")
            return await self._by_rdma(session, lease, config, places, dial)
        except _NoRdmaError as error:
            why = str(error)
        if self._wish == RDMA:
            self.reason = why
            raise UnavailableError(
                f"no RDMA: {why}",
                where=f"donor {self.address}",
                mend="`infiniswap doctor` on both hosts says what is missing; or use "
                "--transport auto.",
            )
        self.fallbacks += 1
        if why != self.reason:
            log.warning(
                "donor %s: pages go over TCP, not RDMA: %s",
                self.address,
                why,
                extra=events.about(events.RDMA_FALLBACK, donor=self.address),
            )
        return await self._by_tcp(config, dial, why)

    @property
    def misses_rdma(self) -> bool:
        """Whether pages go over TCP, and need not for ever."""
        return self._wish != TCP and self.transport == TCP

    async def probe(
        self,
        session: Session,
        lease: Lease,
        config: RemoteConfig,
        places: set[Place],
        leave: Callable[[int], None],
        wait_s: float = 60.0,
    ) -> bool:
        """Whether `connect` would now give RDMA. What it used for that is gone when it returns.

        Args:
            session: as for connect.
            lease: which is in use, over TCP, and stays so.
            config: how a further connection is made.
            places: as for connect.
            leave: ends such a connection.
            wait_s: for a connection, at most.

        Raises:
            InfiniswapError: the session ended.
        """
        # A recovery may have brought it while this one was waiting for its turn.
        if not self.misses_rdma or not session.welcome.rdma or self._is_avoided():
            return False
        self.probes += 1
        slots = lease.export_bytes // session.welcome.slab_bytes
        config = replace(config, connect_ms_max=min(config.connect_ms_max, round(wait_s * 1000)))
        remotes: list[int] = []

        def dial(config: RemoteConfig) -> int:
            remotes.append(self._engine.remote_connect(config))
            return remotes[0]

        try:
            await self._reach(session, lease, config, places, slots, dial)
        except _NoRdmaError as error:
            if str(error) != self.reason:
                log.info("donor %s: still no RDMA: %s", self.address, error)
            self.reason = str(error)
            return False
        finally:
            # Also one that was made while we were told to end.
            for remote in remotes:
                await self._blocking(partial(leave, remote))
        return True

    def _is_avoided(self) -> bool:
        return asyncio.get_running_loop().time() < self._avoided_until_s

    async def _by_tcp(
        self, config: RemoteConfig, dial: Callable[[RemoteConfig], int], why: str
    ) -> int:
        remote = await self._blocking(lambda: dial(config))
        self.transport, self.reason = TCP, why
        return remote

    async def _by_rdma(
        self,
        session: Session,
        lease: Lease,
        config: RemoteConfig,
        places: set[Place],
        dial: Callable[[RemoteConfig], int],
    ) -> int:
        slots = lease.export_bytes // session.welcome.slab_bytes
        remote, answer = await self._reach(session, lease, config, places, slots, dial)
        for slot in answer.slots:
            self._engine.remote_slot_key(remote, slot.slot, slot.key)
        self.transport, self.reason = RDMA, ""
        self._connected_s = asyncio.get_running_loop().time()
        return remote

    async def _reach(
        self,
        session: Session,
        lease: Lease,
        config: RemoteConfig,
        places: set[Place],
        slots: int,
        dial: Callable[[RemoteConfig], int],
    ) -> tuple[int, m.RdmaAnswer]:
        offers: list[RdmaOffer] = []

        def make() -> RdmaOffer:
            offers.append(self._engine.rdma_offer(config.host, config.queues, slots))
            return offers[0]

        try:
            offer = await self._offer(make)
            try:
                answer = await self._ask(session, lease, offer)
                self._check(answer, len(offer.ends), slots, places)
                remote = await self._dial(offer, answer, config, dial)
            except (_RefusedError, RequestRefusedError):
                raise
            except BaseException:
                await self._take_back(session, lease)
                raise
        finally:
            # Also one that was made while we were told to end.
            for made in offers:
                await self._blocking(made.close)
        return remote, answer

    async def _offer(self, make: Callable[[], RdmaOffer]) -> RdmaOffer:
        try:
            return await self._blocking(make)
        except EngineError as error:
            raise _NoRdmaError(f"here: {_without_prefix(error)}") from error

    async def _ask(self, session: Session, lease: Lease, offer: RdmaOffer) -> m.RdmaAnswer:
        try:
            return await session.rdma(lease.lease, offer.ends)
        except RequestRefusedError as error:
            if error.reason != m.REFUSED_NO_RDMA:
                raise
            raise _RefusedError(f"at the donor: {_without_prefix(error)}") from error

    @staticmethod
    async def _take_back(session: Session, lease: Lease) -> None:
        """The donor's half would wait for us until the lease ends, and refuse to map what it
        cannot register. What it has registered stays so for the next time."""
        if session.ended is None:
            with contextlib.suppress(InfiniswapError, TimeoutError):
                async with asyncio.timeout(_TAKE_BACK_S):
                    await session.rdma(lease.lease, [])

    async def _dial(
        self,
        offer: RdmaOffer,
        answer: m.RdmaAnswer,
        config: RemoteConfig,
        dial: Callable[[RemoteConfig], int],
    ) -> int:
        peer = RdmaPeer(offer, tuple(answer.ends), answer.probe)
        try:
            return await self._blocking(lambda: dial(replace(config, rdma=peer)))
        except EngineError as error:
            raise _NoRdmaError(error.what) from error

    @staticmethod
    def _check(answer: m.RdmaAnswer, count: int, slots: int, places: set[Place]) -> None:
        if len(answer.ends) != count:
            raise _NoRdmaError(f"the donor answered with {len(answer.ends)} ends, not {count}")
        there = {Place(slot.slot, slot.generation) for slot in answer.slots}
        # The engine would refuse its key when it is connected already.
        if beyond := [place.slot for place in there if place.slot >= slots]:
            raise _NoRdmaError(f"the donor named slot {beyond[0]} of a lease of {slots}")
        if missing := len(places - there):
            raise _NoRdmaError(
                f"the donor could register {len(places) - missing} of our {len(places)} slabs"
            )

    def mapped(self, remote: int, answer: m.MapAnswer) -> None:
        """A slab was mapped there; before the engine hears of it.

        Raises:
            EngineError: the donor did not say where it lies, or the connections have gone.
        """
        if self.transport != RDMA:
            return
        if answer.key is None:
            raise EngineError("the donor gave no key for the slab, so RDMA cannot reach it")
        self._engine.remote_slot_key(remote, answer.slot, answer.key)

    def lost(self) -> None:
        """The connections are lost. RDMA that breaks at once, again, is not taken for a while."""
        now_s = asyncio.get_running_loop().time()
        if self.transport != RDMA or now_s - self._connected_s > _FLAP_S:
            self._flaps = 0
            return
        self._flaps += 1
        if self._flaps >= _FLAPS_MAX:
            self._flaps = 0
            self._avoided_until_s = now_s + _AVOIDED_S


def _without_prefix(error: EngineError | RequestRefusedError) -> str:
    return error.what.removeprefix("no RDMA: ")
