# SPDX-License-Identifier: Apache-2.0
"""The devices that are connected to this donor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.control.channel import LOST, Ended
from infiniswap.control.service import ServerSession
from infiniswap.donor.leases import GrantedLease, LeaseTable

log = logging.getLogger(__name__)


class Sessions:
    """Open sessions.

    Args:
        table: leases.
        clock: seconds, monotonic.

    Attributes:
        leases_wait: whether a lease outlives its session; not when the daemon gives all back.
    """

    def __init__(self, table: LeaseTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self.leases_wait = True
        self._open: dict[int, ServerSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, session: ServerSession) -> None:
        """A device has proved itself."""
        self._open[session.number] = session
        self._table.session_opened(session.number)
        log.info("%s connected", session)

    def closed(self, session: ServerSession, ended: Ended) -> list[GrantedLease]:
        """A session has ended: its leases, which are returned, wait for their device."""
        self._open.pop(session.number, None)
        leases = self._table.session_closed(session.number, self._clock())
        said_so = ended.reason in (m.GOODBYE_DONE, m.GOODBYE_SHUTDOWN)
        wait = self.leases_wait and bool(leases)
        log.log(
            logging.INFO if said_so else logging.WARNING,
            "%s disconnected (%r)%s",
            session,
            ended.reason if ended.reason == LOST or not ended.detail else ended.detail,
            f"; {_listed(leases)} {'waits' if len(leases) == 1 else 'wait'} for it" if wait else "",
            extra=events.about(events.CONSUMER_LOST) if wait and not said_so else None,
        )
        return leases

    def owner_of(self, lease: int) -> ServerSession | None:
        """The session of the device that holds the lease; None: it is not connected."""
        entry = self._table.get(lease)
        return self._open.get(entry.session or 0) if entry else None

    async def tell_draining(self, draining: bool) -> None:
        """Tells every device whether this donor drains."""
        notice = m.DrainNotice(draining=draining)
        await asyncio.gather(*(each.channel.notify(notice) for each in self._open.values()))


def _listed(leases: Sequence[GrantedLease]) -> str:
    noun = "lease" if len(leases) == 1 else "leases"
    return f"{noun} {', '.join(str(lease.lease) for lease in leases)}"
