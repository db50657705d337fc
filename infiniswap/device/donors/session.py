# SPDX-License-Identifier: Apache-2.0
"""The control session with one donor: opened when it is needed, kept while there is a lease."""

from __future__ import annotations

import contextlib
from functools import partial

from infiniswap.control.client import Session, SessionHandler, connect
from infiniswap.device.donors.lease import HeldLease
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.device.donors.reach import reach
from infiniswap.errors import InfiniswapError
from infiniswap.units import HostPort


class DonorSession:
    """At most one session. Its owner calls `open` and `close` one after the other.

    Args:
        address: of the donor.
        handler: answers the donor.

    Attributes:
        name: of the donor, as it said last.
        current: the session; it may have ended.
        is_draining: whether the donor has said that it accepts no more slabs.
    """

    def __init__(self, address: HostPort, handler: SessionHandler) -> None:
        self.name = ""
        self.current: Session | None = None
        self.is_draining = False
        self._address = address
        self._handler = handler

    @property
    def is_open(self) -> bool:
        """Whether the donor can be asked."""
        return self.current is not None and self.current.ended is None

    async def open(self, config: LinkConfig, lease: HeldLease | None) -> Session:
        """Returns the open session, or opens one with the donor of the lease.

        Raises:
            InfiniswapError: there is none.
        """
        if self.current is not None:
            if self.current.ended is None:
                return self.current
            await self.current.close()
            self.current = None
        to, slab_bytes = self._address, config.device.slab_bytes
        dial = partial(connect, to, config.identity, config.client, slab_bytes=slab_bytes)
        self.current = session = await reach(dial, self._handler, to.host, lease)
        self.name = session.welcome.donor_name
        return session

    def end_unless_trusted(self, authorities: frozenset[bytes]) -> None:
        """Ends the session if this host no longer trusts the donor's authority."""
        session = self.current
        if session and session.proved and session.proved.authority not in authorities:
            session.end()

    async def close(self, lease: HeldLease | None = None) -> None:
        """Gives the lease back, if the donor can be told, and ends the session. Idempotent."""
        session, self.current = self.current, None
        if session is None:
            return
        try:
            if session.ended is None and lease is not None:
                with contextlib.suppress(InfiniswapError):
                    await session.release(lease.lease)
        finally:
            await session.close()  # only this task knows of it if the device closes meanwhile
