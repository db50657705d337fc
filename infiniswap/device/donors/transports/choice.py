# SPDX-License-Identifier: Apache-2.0
"""Which transport carries the pages to one donor, and why it is not a better one.

The choice is made for each new set of connections. While it is not the best one that the
configuration allows, the device keeps probing for a better one in the background (`search`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.device.donors.transports.base import Dial, Target, Transport, UnusableError
from infiniswap.engine.protocol import Engine, OffLoop, RemoteConfig
from infiniswap.errors import UnavailableError
from infiniswap.units import HostPort

log = logging.getLogger(__name__)

_FLAP_S = 5.0
_FLAPS_MAX = 2
_AVOIDED_S = 60.0


class TransportChoice:
    """The transport of the connections to one donor.

    Args:
        transports: those that may be used, best first.
        address: of the donor, for messages.
        engine: makes the connections.
        blocking: for the engine's blocking calls.

    Attributes:
        address: of the donor.
        name: of the last connections' transport, empty before there were any.
        reason: why it is not the best one; empty if it is.
        fallbacks: how often it was not.
        probes: how often a better one was tried besides.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        address: HostPort,
        engine: Engine,
        blocking: OffLoop,
    ) -> None:
        self.name = ""
        self.reason = ""
        self.fallbacks = 0
        self.probes = 0
        self.address = address
        self._transports = transports
        self._engine = engine
        self._blocking = blocking
        self._connected_s = 0.0
        self._flaps = 0
        self._avoided_until_s: dict[str, float] = {}

    @property
    def best(self) -> Transport:
        """The best transport that may be used."""
        return self._transports[0]

    @property
    def misses_better(self) -> bool:
        """Whether there are connections, and by another transport than the best."""
        return self.name not in ("", self.best.name)

    async def connect(self, target: Target, dial: Dial) -> int:
        """Connects to a lease by the best transport that can be used now.

        Returns:
            The remote's number.

        Raises:
            UnavailableError: the only transport that may be used cannot be.
            InfiniswapError: no connection at all, or the session ended.
        """
        whys: list[str] = []
        for transport in self._transports:
            why = "; ".join(whys)
            if why:
                self._fall_back(transport, why)
            try:
                self._check_usable(transport, target.session.welcome)
                remote = await transport.connect(target, dial)
            except UnusableError as error:
                whys.append(str(error))
                continue
            self.name, self.reason = transport.name, why
            self._connected_s = asyncio.get_running_loop().time()
            return remote
        self.reason = "; ".join(whys)
        raise UnavailableError(
            f"no {self.best.label}: {self.reason}",
            where=f"donor {self.address}",
            mend="`infiniswap doctor` on both hosts says what is missing; or use --transport auto.",
        )

    def _fall_back(self, transport: Transport, why: str) -> None:
        self.fallbacks += 1
        if why != self.reason:
            about = events.about(events.RDMA_FALLBACK, donor=self.address)
            text = "donor %s: pages go over %s, not %s: %s"
            log.warning(text, self.address, transport.label, self.best.label, why, extra=about)

    def _check_usable(self, transport: Transport, welcome: m.Welcome) -> None:
        if not transport.is_offered(welcome):
            raise UnusableError(f"the donor does not offer {transport.label}")
        if self._is_avoided(transport):
            raise UnusableError(f"its {transport.label} connections broke again and again")

    def _is_avoided(self, transport: Transport) -> bool:
        return asyncio.get_running_loop().time() < self._avoided_until_s.get(transport.name, 0.0)

    async def probe(self, target: Target, wait_s: float = 60.0) -> bool:
        """Whether `connect` would now give a better transport than the one in use, whose
        connections stay as they are. What was used to find out is gone afterwards.

        Args:
            target: as for connect.
            wait_s: for a connection, at most.

        Raises:
            InfiniswapError: the session ended.
        """
        ms_max = min(target.config.connect_ms_max, round(wait_s * 1000))
        target = replace(target, config=replace(target.config, connect_ms_max=ms_max))
        for transport in self._transports:
            if self.name in ("", transport.name):  # a recovery may have brought a better one
                return False
            if transport.is_offered(target.session.welcome) and not self._is_avoided(transport):
                self.probes += 1
                if await self._can_connect(transport, target):
                    return True
        return False

    async def _can_connect(self, transport: Transport, target: Target) -> bool:
        remotes: list[int] = []

        def dial(config: RemoteConfig) -> int:
            remotes.append(self._engine.remote_connect(config))
            return remotes[0]

        try:
            await transport.connect(target, dial, is_trial=True)
        except UnusableError as error:
            if str(error) != self.reason:
                log.info("donor %s: still no %s: %s", self.address, transport.label, error)
            self.reason = str(error)
            return False
        finally:
            # Also a connection that was made while this task was cancelled.
            for remote in remotes:
                await self._blocking(partial(self._engine.remote_destroy, remote))
        return True

    def mapped(self, remote: int, answer: m.MapAnswer) -> None:
        """A slab was mapped at the donor: see Transport."""
        for transport in self._transports:
            if transport.name == self.name:
                transport.mapped(remote, answer)

    def lost(self) -> None:
        """The connections are lost. A transport that twice broke at once is avoided for a while,
        where there is another one."""
        now_s = asyncio.get_running_loop().time()
        if self.name == self._transports[-1].name or now_s - self._connected_s > _FLAP_S:
            self._flaps = 0
            return
        self._flaps += 1
        if self._flaps >= _FLAPS_MAX:
            self._flaps = 0
            self._avoided_until_s[self.name] = now_s + _AVOIDED_S
