# SPDX-License-Identifier: Apache-2.0
"""A donor whose control port says what a test tells it to, for tests of consumers.

A donor whose control port is honest and whose data port lies: lying_donor.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.own_certificate import new_certificate
from infiniswap.control.tls import ServerTls, server_tls
from infiniswap.units import GIB, HostPort
from support.donors.donor_world import KEYS, transcript_of

Conversation = Callable[[web.WebSocketResponse], Awaitable[Any]]
"""What happens in a session after its handshake."""

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\u200b\r\nERROR forged"
"""A title, a cleared screen, a colour by C1, a turned direction, nothing visible, a log line."""


_PIECE_BYTES = 64 * 1024


def status(**changes: Any) -> dict[str, Any]:
    """A status as plain data; `changes` by name of the field, `pool__can_map` for one inside."""
    made: dict[str, Any] = {
        "donor_id": "00000000-0000-0000-0000-0000000000dd",
        "donor_name": "donor",
        "incarnation": "0" * 32,
        "software": "0.1",
        "versions": [1],
        "uptime_s": 1.0,
        "slab_bytes": GIB,
        "control_port": 9400,
        "data_port": 9401,
        "draining": False,
        "sessions": 0,
        "pool": {
            "limit_bytes": 4 * GIB,
            "slabs_max": 4,
            "slabs_free": 4,
            "slabs_mapped": 0,
            "slabs_dirty": 0,
            "slabs_unpinned": 0,
            "can_map": 4,
        },
        "memory": {
            "source": "host",
            "total_bytes": 64 * GIB,
            "available_bytes": 32 * GIB,
            "headroom_bytes": 8 * GIB,
            "others_bytes": 16 * GIB,
            "used_share": 0.25,
        },
        "leases": [],
        "counters": {},
    }
    for name, value in changes.items():
        part, _, inner = name.rpartition("__")
        (made[part] if part else made)[inner] = value
    return made


def lease(**changes: Any) -> dict[str, Any]:
    """A lease in a status."""
    return {
        "lease": 1,
        "device_id": "00000000-0000-0000-0000-00000000000a",
        "device_name": "swap0",
        "host_name": "consumer",
        "address": "127.0.0.1:1",
        "state": "active",
        "session": True,
        "epoch": 1,
        "slots_max": 4,
        "slots_mapped": 0,
        "connections": 0,
        "read_bytes": 0,
        "write_bytes": 0,
        **changes,
    }


@functools.cache
def hostile_tls() -> ServerTls:
    """Key and certificate of every hostile donor."""
    return server_tls(new_certificate())


class HostileDonor:
    """A running one; whatever it says may be changed at any time.

    Attributes:
        body: answer to a request for its status.
        headers: of that answer.
        greeting: its answer to a hello.
        keys: of the cluster that it belongs to.
        converse: what it does in sessions.
        welcome: fields of the welcome that are not as usual.
        sessions: handshakes so far.
        is_silent: takes requests and answers none.
    """

    def __init__(self) -> None:
        self.address = HostPort("127.0.0.1", 0)
        self.body = b""
        self.headers: dict[str, str] = {"Content-Type": "application/json"}
        self.greeting: Any = m.Challenge(version=2, versions=[2], nonce=secrets.token_hex(32))
        self.keys = KEYS
        self.tls = hostile_tls()
        self.converse: Conversation = quiet
        self.welcome: dict[str, Any] = {}
        self.sessions = 0
        self.is_silent = False

    async def serve(self, ready: Callable[[], None], stop: Awaitable[Any]) -> None:
        """Until `stop` is done."""
        app = web.Application()
        app.router.add_get(m.NONCE_PATH, self._nonce)
        app.router.add_get(m.STATUS_PATH, self._status)
        app.router.add_get(m.SESSION_PATH, self._session)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.tls.context)
            await site.start()
            self.address = HostPort("127.0.0.1", runner.addresses[0][1])
            ready()
            await stop
        finally:
            await runner.cleanup()

    async def _nonce(self, request: web.Request) -> web.Response:
        await self._heard(request)
        return web.json_response({"nonce": "0" * 64})

    async def _heard(self, request: web.Request) -> None:
        if self.is_silent:
            await fall_silent(request.transport)

    async def _status(self, request: web.Request) -> web.StreamResponse:
        # In pieces, so that what this process holds is what the consumer holds.
        asked = auth.HttpRequest(self.tls.digest, request.method, request.path, "0" * 64)
        proof = auth.http_donor_proof(self.keys.session, asked)
        response = web.StreamResponse(headers={auth.PROOF_HEADER: proof, **self.headers})
        response.content_length = len(self.body)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(self.body), _PIECE_BYTES):
                await response.write(memoryview(self.body)[at : at + _PIECE_BYTES])
        return response

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(protocols=(m.SUBPROTOCOL,), compress=False, autoping=False)
        await ws.prepare(request)
        await self._heard(request)
        first = m.decode_to_donor(await ws.receive_str())
        assert isinstance(first, m.Hello)
        await _say(ws, self.greeting)
        if not isinstance(self.greeting, m.Challenge):
            return ws
        m.decode_to_donor(await ws.receive_str())
        usual: dict[str, Any] = {
            "version": 2,
            "proof": auth.donor_proof(
                self.keys.session, transcript_of(self.tls.digest, first, self.greeting)
            ),
            "donor_id": "00000000-0000-0000-0000-0000000000dd",
            "donor_name": "donor",
            "incarnation": "0" * 32,
            "slab_bytes": GIB,
            "data_port": 1,
            "grace_ms": 1000,
            "heartbeat_ms": 50,
            "silence_ms": 5000,
            "draining": False,
        }
        await _say(ws, m.Welcome(**{**usual, **self.welcome}))
        self.sessions += 1
        with contextlib.suppress(ConnectionError, RuntimeError):
            await self.converse(ws)
        return ws


async def _say(ws: web.WebSocketResponse, message: Any) -> None:
    await ws.send_str(m.encode(message).decode())


async def fall_silent(transport: asyncio.Transport | None) -> None:
    """Takes no word any more, and answers none; until cancelled."""
    assert transport is not None
    transport.pause_reading()
    try:
        await asyncio.Event().wait()
    finally:
        transport.abort()


async def quiet(ws: web.WebSocketResponse) -> None:
    """Says nothing, and reads on."""
    async for _ in ws:
        pass


@contextlib.asynccontextmanager
async def hostile() -> AsyncIterator[HostileDonor]:
    """One on this event loop."""
    donor = HostileDonor()
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(donor.serve(ready.set, stop.wait()))
    await asyncio.wait(
        {task, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED
    )
    try:
        yield donor
    finally:
        stop.set()
        await task


@contextlib.contextmanager
def hostile_beside() -> Iterator[HostileDonor]:
    """One in a thread of this process, for programs that are asked to use it."""
    donor = HostileDonor()
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(donor.serve(ready.set, asyncio.to_thread(stop.wait)))
    )
    thread.start()
    try:
        assert ready.wait(60)
        yield donor
    finally:
        stop.set()
        thread.join()
