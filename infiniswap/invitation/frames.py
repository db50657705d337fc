# SPDX-License-Identifier: Apache-2.0
"""Frames on a TLS connection, and the TLS of an invitation. Callers bound the time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from infiniswap.control.own_certificate import Shower, new_certificate
from infiniswap.control.tls import ServerTls, abort, server_tls
from infiniswap.errors import ProtocolMismatchError
from infiniswap.invitation.messages import HEAD, MessageT, decode, encode

_SHOWER: Final = Shower("invitation", "infiniswap-invitation", "invitation's port", "", "")


def new_tls() -> ServerTls:
    """A key and a certificate for one invitation. They lie in memory only."""
    return server_tls(new_certificate(_SHOWER))


async def receive(reader: asyncio.StreamReader, kind: type[MessageT], bytes_max: int) -> MessageT:
    """The next message.

    Raises:
        ProtocolMismatchError: it is too long, or none.
        EOFError, OSError: the connection ended.
    """
    (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    if length > bytes_max:
        raise ProtocolMismatchError(f"the other end announced a message of {length} bytes")
    return decode(await reader.readexactly(length), kind)


async def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Sends a message. Raises OSError: the connection ended."""
    writer.write(encode(message))
    await writer.drain()


async def close(writer: asyncio.StreamWriter, wait_s: float = 2.0) -> None:
    """Says goodbye, in bounded time."""
    writer.close()
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(wait_s):
                await writer.wait_closed()
    finally:
        abort(writer.transport)
