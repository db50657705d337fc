# SPDX-License-Identifier: Apache-2.0
"""Whom a control port with certificates lets in, and who may not go on: what TLS has verified when
a connection began is compared with what counts now.

- A session ends as soon as an authority that made its certificate believed is no longer trusted.
- It ends OVERDUE_S after its certificate has expired. A device with a renewed one comes back with
  its leases; a certificate that ran out for a moment, or a clock that was wrong for one, costs no
  pages.
- A request over HTTP gets no such time.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from infiniswap.control import messages as m
from infiniswap.control.dated import day
from infiniswap.control.mutual import verified_chain
from infiniswap.control.roles import Role, Subject, require, uris_of
from infiniswap.control.tls import ServerTls, digest_of

if TYPE_CHECKING:
    from infiniswap.control.service import ServerSession

OVERDUE_S: Final = 3600.0
"""How long an open session outlives its certificate."""
_NOT_TRUSTED: Final = "the donor no longer trusts the authority of this certificate"


class Connection(Protocol):
    """What tells of a connection: a transport, or a WebSocket."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio.BaseTransport."""


@dataclass(frozen=True, slots=True)
class Proved:
    """What TLS has verified of the other end of a connection.

    Attributes:
        subject: who it is.
        until_s: the end of its certificate, in Unix time.
        authority: that made it believed, as `digest_of` its certificate.
    """

    subject: Subject
    until_s: float
    authority: bytes


def proved_by(connection: Connection | None, cluster: str, roles: frozenset[Role]) -> Proved:
    """What the other end has proved: a host of that cluster in one of these roles.

    Args:
        connection: None: it has ended.
        cluster, roles: see `require`.

    Raises:
        ValueError: it has not; says why.
    """
    shown = connection.get_extra_info("peercert") if connection is not None else None
    subject = require(uris_of(shown or {}), cluster, roles)
    assert connection is not None
    assert shown is not None
    chain = verified_chain(connection.get_extra_info("ssl_object"))
    until_s = float(ssl.cert_time_to_seconds(shown["notAfter"]))
    return Proved(subject, until_s, digest_of(chain[-1]))


class Admission:
    """Goes by the certificates of a donor.

    Args:
        tls: of the donor; empty `cluster`: nobody is asked for a certificate.

    Attributes:
        tls: as it is now.
    """

    def __init__(self, tls: ServerTls) -> None:
        self.tls = tls

    def admit(self, connection: Connection | None, roles: frozenset[Role], now_s: float) -> Proved:
        """What the other end has proved, if that is enough now.

        Args:
            connection: None: it has ended.
            roles: one of them is needed.
            now_s: Unix time.

        Raises:
            ValueError: it is not; says why.
        """
        proved = proved_by(connection, self.tls.cluster, roles)
        if not self._trusts(proved):
            raise ValueError(_NOT_TRUSTED)
        if now_s > proved.until_s:
            raise ValueError(_expired(proved))
        return proved

    def _trusts(self, proved: Proved) -> bool:
        return proved.authority in self.tls.authorities

    def end_given_up(
        self, sessions: Iterable[ServerSession], now_s: float | None, loop_s: float
    ) -> None:
        """Ends sessions whose certificates no longer count.

        Args:
            sessions: those that are open.
            now_s: Unix time; None: this host does not know it well enough to end anything.
            loop_s: seconds of a clock that nobody sets.
        """
        for session in sessions:
            proved = session.proved
            if proved is None:
                continue
            if now_s is None or now_s <= proved.until_s:
                session.expired_s = None
            elif session.expired_s is None:
                session.expired_s = loop_s
            if not self._trusts(proved):
                session.channel.end(m.GOODBYE_CERTIFICATE, _NOT_TRUSTED)
            elif session.expired_s is not None and loop_s - session.expired_s >= OVERDUE_S:
                session.channel.end(m.GOODBYE_CERTIFICATE, _expired(proved))


def _expired(proved: Proved) -> str:
    return f"the certificate of {proved.subject.host} has expired, on {day(proved.until_s)}"
