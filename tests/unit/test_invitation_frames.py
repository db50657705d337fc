# SPDX-License-Identifier: Apache-2.0
"""The end of an invitation's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from infiniswap.control.tls import client_context
from infiniswap.invitation.frames import close, new_tls


class _TwiceClosed:
    """What Python 3.11.2 makes of a TLS transport that the peer has closed, and then this end."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.close, self.wait_closed = writer.close, writer.wait_closed
        self.transport = self

    def abort(self) -> None:
        raise AttributeError("'NoneType' object has no attribute '_abort'")


@pytest.mark.parametrize("end", [lambda writer: writer, _TwiceClosed], ids=["this", "3.11.2"])
async def test_a_peer_that_closes_first_is_no_error(
    end: Callable[[asyncio.StreamWriter], asyncio.StreamWriter],
) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await close(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=new_tls().context) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context())
        assert await reader.read() == b""
        await close(end(writer))
        assert writer.is_closing()
