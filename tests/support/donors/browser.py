# SPDX-License-Identifier: Apache-2.0
"""What a browser does at a daemon's page, without one."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from infiniswap.control.tls import client_context
from infiniswap.units import HostPort


@contextlib.asynccontextmanager
async def browser(tls: ssl.SSLContext | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Requests without redirects and without Host or Origin but as the test gives them."""
    connector = aiohttp.TCPConnector(ssl=tls or client_context(), force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield http


async def get(http: aiohttp.ClientSession, address: HostPort, path: str, **headers: str) -> Any:
    """The answer, read."""
    url = f"https://{address}{path}"
    async with http.get(url, headers=headers, allow_redirects=False) as answer:
        await answer.read()
        return answer


@contextlib.asynccontextmanager
async def live(
    http: aiohttp.ClientSession, address: HostPort, **said: str
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """The page's WebSocket, after its first message."""
    url, origin = f"https://{address}/ui/live", f"https://{address}"
    async with http.ws_connect(url, origin=origin) as ws:
        await ws.send_str(json.dumps(said))
        yield ws


async def heard(ws: aiohttp.ClientWebSocketResponse, kind: str) -> dict[str, Any]:
    """The next message of that kind."""
    while True:
        message: dict[str, Any] = json.loads(await ws.receive_str())
        if message["kind"] == kind:
            return message
