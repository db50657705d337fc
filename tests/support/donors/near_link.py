# SPDX-License-Identifier: Apache-2.0
"""Sessions with a donor of this process, from hosts that are not there.

On loopback every consumer is this host. Where a test needs others, its sessions take their messages
straight to the server, under the address that the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp import WSMessage, WSMsgType

from infiniswap.control import messages as m
from infiniswap.control.peer import Caller
from infiniswap.control.server import ControlServer

_CLOSED = WSMessage(WSMsgType.CLOSED, None, None)


class _End:
    """One end: what Channel uses of aiohttp's two WebSocket classes."""

    protocol = m.SUBPROTOCOL

    def __init__(self, certificate: bytes = b"") -> None:
        self.other = self
        self._certificate = certificate
        self._inbox: asyncio.Queue[WSMessage] = asyncio.Queue()
        self._is_open = True

    def get_extra_info(self, name: str) -> SimpleNamespace | None:
        """There is no socket, but the server's certificate."""
        return SimpleNamespace(getpeercert=self._shown) if name == "ssl_object" else None

    def _shown(self, *, binary_form: bool) -> bytes:
        assert binary_form
        return self._certificate

    async def receive(self) -> WSMessage:
        return await self._inbox.get() if self._is_open or self._inbox.qsize() else _CLOSED

    async def send_str(self, text: str) -> None:
        if not self._is_open:
            raise ConnectionResetError("Cannot write to closing transport")
        self.other._inbox.put_nowait(WSMessage(WSMsgType.TEXT, text, None))

    async def close(self) -> None:
        for end in (self, self.other):
            if end._is_open:
                end._is_open = False
                end._inbox.put_nowait(_CLOSED)


class _Http:
    """What `connect` uses of aiohttp.ClientSession."""

    def __init__(self, server: ControlServer, address: str) -> None:
        self._server = server
        self._address = address
        self._served: asyncio.Task[None] | None = None

    async def ws_connect(self, _url: str, **_options: object) -> _End:
        mine, theirs = _End(self._server._config.tls.certificate), _End()
        mine.other, theirs.other = theirs, mine
        serving = self._server.converse(cast(Any, theirs), Caller.at(self._address))
        self._served = asyncio.create_task(serving, name=f"session of {self._address}")
        return mine

    async def close(self) -> None:
        if self._served is not None:
            await self._served


def http_from(server: ControlServer, host: str) -> Callable[[], aiohttp.ClientSession]:
    """For ClientConfig.http: sessions with that server, from that address."""
    return lambda: cast(aiohttp.ClientSession, _Http(server, f"{host}:1"))
