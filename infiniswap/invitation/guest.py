# SPDX-License-Identifier: Apache-2.0
"""The end of the joining host: it finds the host whose certificate the token names, and sends the
password to that one only."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from infiniswap.control.peer import unmapped
from infiniswap.control.tls import client_context, peer_digest
from infiniswap.errors import (
    DonorRefusedError,
    InfiniswapError,
    NoDonorError,
    ProtocolMismatchError,
    SessionLostError,
    WrongCertificateError,
)
from infiniswap.invitation import messages as m
from infiniswap.invitation.frames import close, receive, send
from infiniswap.invitation.once import Verdict
from infiniswap.invitation.port import REFUSED
from infiniswap.invitation.token import Token
from infiniswap.units import HostPort

_CONNECT_S: Final = 4.0
_ANSWER_S: Final = 20.0
_AGAIN: Final = (
    "Run `infiniswap invite` again on the other host, and here the command that it prints."
)
_WHY: Final[dict[str, str]] = {
    Verdict.USED: "this token was used before, and it is good once. If you have not used it, "
    "somebody else has: see which host joined, and change the cluster secret if you do not know it",
    Verdict.LATE: "this token is more than ten minutes old",
    Verdict.WRONG: "the token is of another invitation of that host",
}


@dataclass(frozen=True, slots=True)
class GuestConnection:
    """With the inviting host; its certificate is the one of the token.

    Attributes:
        address: of the inviting host.
        own: address of this host on the way there.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: HostPort
    own: str


@contextlib.asynccontextmanager
async def connected(token: Token) -> AsyncIterator[GuestConnection]:
    """Connects to the inviting host. Nothing but the TLS handshake is sent.

    Raises:
        NoDonorError: nobody answers at any of its addresses.
        WrongCertificateError: somebody else does.
    """
    failures: list[InfiniswapError] = []
    found: GuestConnection | None = None
    for address in token.addresses:
        try:
            found = await _connect(address, token.digest)
            break
        except InfiniswapError as error:
            failures.append(error)
    if found is None:
        raise _unreachable(failures)
    try:
        yield found
    finally:
        await close(found.writer)


def _unreachable(failures: list[InfiniswapError]) -> InfiniswapError:
    wrong = [error for error in failures if isinstance(error, WrongCertificateError)]
    if wrong:
        return wrong[0]
    return NoDonorError(
        "the inviting host does not answer: "
        + "; ".join(f"{error.where} {error.what}" for error in failures),
        mend="A token is good once and for ten minutes, while `infiniswap invite` runs: if it has "
        f"ended, run it again. Otherwise let TCP port {failures[0].where.rpartition(':')[2]} in "
        "through the firewall there, or name an address that this host reaches with --listen.",
    )


async def _connect(address: HostPort, digest: bytes) -> GuestConnection:
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=client_context(), limit=m.REQUEST_BYTES_MAX
            )
    except TimeoutError:
        raise NoDonorError("gives no answer", where=str(address)) from None
    except (OSError, UnicodeError) as error:  # of TLS as well; a name that cannot be one
        why = "refuses the connection" if isinstance(error, ConnectionRefusedError) else str(error)
        raise NoDonorError(why, where=str(address)) from None
    try:
        seen = peer_digest(writer.transport)
    except ProtocolMismatchError:
        writer.transport.abort()
        raise NoDonorError("ends the connection", where=str(address)) from None
    if not hmac.compare_digest(seen, digest):
        writer.transport.abort()
        raise WrongCertificateError(
            "the host that answers does not have the certificate of the token, so nothing was sent",
            where=str(address),
            mend="Either the token is of an earlier `infiniswap invite`, or a host on the way "
            "pretends to be the inviting one. Use the token of the invitation that is open now. If "
            "this comes again, do not join over this network.",
        )
    return GuestConnection(reader, writer, address, unmapped(writer.get_extra_info("sockname")[0]))


async def present(connection: GuestConnection, request: m.InvitationRequest) -> m.Offer:
    """Shows the password.

    Raises:
        DonorRefusedError: the invitation is used or late, or this host cannot have it.
        SessionLostError: no answer came; the invitation may be used.
        ProtocolMismatchError: the answer is none.
    """
    where = str(connection.address)
    try:
        async with asyncio.timeout(_ANSWER_S):
            await send(connection.writer, request)
            answer = await receive(connection.reader, m.InvitationAnswer, m.ANSWER_BYTES_MAX)
    except (OSError, EOFError, TimeoutError) as error:
        raise SessionLostError(
            f"the answer of the inviting host was lost ({error or type(error).__name__}), and the "
            "token may be used up",
            where=where,
            mend=f"This host is unchanged. {_AGAIN}",
        ) from error
    if answer.offer is not None and answer.verdict in (Verdict.GIVEN, Verdict.PREVIEWED):
        return answer.offer
    if answer.verdict == REFUSED:
        raise DonorRefusedError(answer.why or "it gives no reason", where=where)
    why = _WHY.get(answer.verdict)
    if why is None:
        raise ProtocolMismatchError("the inviting host gave no answer to the token", where=where)
    raise DonorRefusedError(why, where=where, mend=_AGAIN)


async def confirm(connection: GuestConnection, lends: str) -> str | None:
    """Says that this host has joined.

    Returns:
        What the inviting host did about this host's daemon; None: it did not say.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            await send(connection.writer, m.Joined(lends))
            return (await receive(connection.reader, m.Noted, m.REQUEST_BYTES_MAX)).sentence
    except (OSError, EOFError, TimeoutError, ProtocolMismatchError):
        return None
