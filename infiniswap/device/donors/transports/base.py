# SPDX-License-Identifier: Apache-2.0
"""What a transport is: its name, what it needs, and how it connects to a lease."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeAlias

from infiniswap.control import messages as m
from infiniswap.control.client import Session
from infiniswap.device.donors.lease import HeldLease, Place
from infiniswap.engine.protocol import Engine, OffLoop, RemoteConfig

Dial: TypeAlias = Callable[[RemoteConfig], int]
"""Blocking. Connects or reconnects in the engine; returns the remote's number."""


_TRIAL_NUMBER: Final = 16
"""Number of the first connection of a trial: those of the connections in use are below it, and a
ticket of the same number would end them."""


class UnusableError(Exception):
    """Why a transport cannot be used now."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where connections lead.

    Attributes:
        session: with the donor, which holds the lease.
        lease: as granted or renewed just now.
        config: host and port; the transport adds the tickets.
        places: slabs there that the connections must reach.
    """

    session: Session
    lease: HeldLease
    config: RemoteConfig
    places: frozenset[Place] = frozenset()


class Transport:
    """One way for pages to travel to one donor. The defaults suit a transport that needs nothing.

    Attributes:
        name: in the configuration, in status and in metrics.
        label: in sentences.
    """

    name: ClassVar[str]
    label: ClassVar[str]

    def __init__(self, engine: Engine, blocking: OffLoop) -> None:
        self._engine = engine
        self._blocking = blocking

    @classmethod
    def check(cls, host: str) -> None:
        """Blocking. Whether this host can reach that one.

        Raises:
            EngineError: what is missing here.
        """

    @classmethod
    def preload(cls) -> None:
        """Blocking. Loads what a connect needs: when a standby takes over it can read no disk."""

    @classmethod
    def watch(cls, engine: Engine, blocking: OffLoop) -> Coroutine[Any, Any, None] | None:
        """What has to run as long as the device serves."""
        return None

    @classmethod
    def is_offered(cls, welcome: m.Welcome) -> bool:
        """Whether the donor says that it has this transport."""
        return True

    async def connect(self, target: Target, dial: Dial, *, is_trial: bool = False) -> int:
        """Connects to the lease. A trial tells the engine nothing about the lease's slabs.

        Returns:
            The remote's number.

        Raises:
            UnusableError: there can be no such connection now.
            InfiniswapError: there can be no connection at all, or the session ended.
        """
        raise NotImplementedError

    async def _with_tickets(self, target: Target, count: int, *, is_trial: bool) -> RemoteConfig:
        """What to dial, with a ticket for each of `count` TCP connections: good for 10 s."""
        first = _TRIAL_NUMBER if is_trial else 0
        tickets = await target.session.tickets(target.lease.lease, first, count)
        return replace(target.config, tickets=tuple(tickets))

    def mapped(self, remote: int, answer: m.MapAnswer) -> None:
        """A slab was mapped at the donor; called before the engine hears of it.

        Raises:
            EngineError: the slab cannot be reached, or the connections are gone.
        """
