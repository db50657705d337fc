# SPDX-License-Identifier: Apache-2.0
"""The lease at one donor and the data connections to it: a remote of the engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import replace

from infiniswap.control.client import Session
from infiniswap.device.donors.counts import LinkCounts, info_of
from infiniswap.device.donors.lease import (
    HeldLease,
    LeaseGoneError,
    Place,
    encode_record,
    new_lease,
)
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.donors.transports import allowed
from infiniswap.device.donors.transports.base import Target
from infiniswap.device.donors.transports.choice import TransportChoice
from infiniswap.engine.protocol import Engine, OffLoop, RemoteConfig
from infiniswap.errors import DeadlineError, InfiniswapError, NoDonorError
from infiniswap.units import HostPort

log = logging.getLogger(__name__)


class Connections:
    """The lease and the connections of one link. They change only under the link's lock.

    Args:
        address: of the donor.
        engine: makes the connections.
        config: of the device.
        blocking: for the engine's blocking calls.

    Attributes:
        config: may be replaced at any time; the next connections use it.
        lease: at the donor, or None.
        remote: the engine's number of the connections, or None.
        transport: carries the pages.
        counts: what has happened so far.
        is_closing: whether the device closes. Then nothing new is begun.
    """

    def __init__(
        self, address: HostPort, engine: Engine, config: LinkConfig, blocking: OffLoop
    ) -> None:
        self.config = config
        self.lease: HeldLease | None = None
        self.remote: int | None = None
        self.counts = LinkCounts()
        self.is_closing = False
        self._address = address
        self._engine = engine
        self._blocking = blocking
        transports = [kind(engine, blocking) for kind in allowed(config.device.transport)]
        self.transport = TransportChoice(transports, address, engine, blocking)

    @property
    def is_down(self) -> bool:
        """Whether the connections are lost."""
        info = info_of(self._engine, self.remote)
        return info is not None and info.state == "down"

    async def open(self, session: Session) -> None:
        """Gets a lease, unless there is one, and connects to it.

        Raises:
            InfiniswapError: refused, or unreachable.
        """
        if self.lease is None:
            slabs, device = self.config.slab_count, self.config.device
            try:
                self.lease = await new_lease(session, slabs, device.slab_bytes, device.queues)
            except DeadlineError:
                # The donor may have granted a lease that nobody knows; it ends with the session.
                await session.close()
                raise
        target = self._target(session, self.lease)
        remote = await self.transport.connect(target, self._engine.remote_connect)
        self._record(remote, self.lease)
        self.remote = remote
        self.counts.begin()

    async def renew(
        self, session: Session, lease: HeldLease, remote: int, mapped: Iterable[Place]
    ) -> set[Place]:
        """Reclaims the lease, and gives the same remote new connections.

        Returns:
            The places that still hold slabs of ours.

        Raises:
            LeaseGoneError: the donor has forgotten the lease.
            InfiniswapError: refused, or unreachable.
        """
        if session.welcome.incarnation != lease.incarnation:
            raise LeaseGoneError("the daemon was restarted without this lease")
        if session.ended is not None:  # going on would cost connections that may be healthy
            raise NoDonorError("it has ended the session", where=f"donor {self._address}")
        # The old connections must be dead before the donor is asked to fence them. Healthy ones
        # are suspended for that moment.
        self._engine.remote_shutdown(remote)
        answer = await session.renew(lease.lease, lease.reclaim, lease.epoch)
        lease = replace(lease, epoch=answer.epoch, peer=session.peer)
        self.lease = lease
        self._record(remote, lease)
        there = {Place(info.slot, info.generation) for info in answer.slots}

        def dial(config: RemoteConfig) -> int:
            self._engine.remote_reconnect(remote, config)
            return remote

        await self.transport.connect(self._target(session, lease, there.intersection(mapped)), dial)
        return there

    async def probe(self, session: Session, mapped: Iterable[Place], wait_s: float) -> bool:
        """Whether a better transport works now. See TransportChoice."""
        assert self.lease is not None
        return await self.transport.probe(self._target(session, self.lease, mapped), wait_s)

    def _record(self, remote: int, lease: HeldLease) -> None:
        self._engine.remote_record_set(remote, encode_record(self._address, lease))

    def _target(self, session: Session, lease: HeldLease, places: Iterable[Place] = ()) -> Target:
        data, device = session.data_address, self.config.device
        remote = RemoteConfig(
            host=data.host,
            port=data.port,
            tickets=(),  # the transport asks for them when it connects
            export_bytes=lease.export_bytes,
            queues=device.queues,
            connect_ms_max=device.connect_ms,
            request_ms_max=device.request_ms,
        )
        return Target(session, lease, remote, frozenset(places))

    def shut_down(self) -> None:
        """Ends the connections, if there are any; the engine suspends the slabs there."""
        if self.remote is not None:
            with contextlib.suppress(InfiniswapError):
                self._engine.remote_shutdown(self.remote)

    async def forget(self) -> None:
        """Removes the remote, where no slab is mapped, and forgets the lease."""
        if (remote := self.remote) is not None:
            self.counts.end(info_of(self._engine, remote))
            await self._blocking(lambda: self._engine.remote_destroy(remote))
        self.counts.given_up += 1
        self.remote = self.lease = None
