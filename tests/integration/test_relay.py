# SPDX-License-Identifier: Apache-2.0
"""A host without the secret between a consumer and a donor: it was named as a donor, and forwards.

In protocol version 1 it owned the session afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.donors.donor_world import (
    IDENTITY,
    WAIT_S,
    Handler,
    World,
    client_config,
    raw,
    world,
)
from support.donors.hostile_donor import hostile_tls

from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.client import connect, fetch_status, set_draining
from infiniswap.control.tls import FIRST_BYTE, client_context
from infiniswap.errors import WrongSecretError
from infiniswap.units import HostPort


class Relay:
    """Ends TLS with a certificate of its own, and says to each end what the other one said.

    Attributes:
        address: where consumers find it.
        heard: every message, of both ends.
        claims: what it says that its certificate is; empty: what the donor says.
    """

    def __init__(self, donor: HostPort, claims: bytes = b"") -> None:
        self.donor = donor
        self.address = HostPort("127.0.0.1", 0)
        self.heard: list[Any] = []
        self.claims = claims
        self.authorizations: list[str] = []

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        consumer = web.WebSocketResponse(protocols=(m.SUBPROTOCOL,), autoping=False)
        await consumer.prepare(request)
        url = f"https://{self.donor}{m.SESSION_PATH}"
        async with (
            aiohttp.ClientSession(connector=_connector()) as http,
            http.ws_connect(url, protocols=(m.SUBPROTOCOL,), autoping=False) as donor,
        ):
            await asyncio.wait(
                {
                    asyncio.ensure_future(self._forward(consumer, donor, m.decode_to_donor)),
                    asyncio.ensure_future(self._forward(donor, consumer, m.decode_to_consumer)),
                }
            )
        return consumer

    async def _forward(self, source: Any, target: Any, decode: Callable[[str], Any]) -> None:
        async for message in source:
            self.heard.append(decode(message.data))
            with contextlib.suppress(ConnectionError):
                await target.send_str(message.data)
        await target.close()

    async def http(self, request: web.Request) -> web.Response:
        headers = {}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
            self.authorizations.append(headers["Authorization"])
        async with (
            aiohttp.ClientSession(connector=_connector()) as http,
            http.request(
                request.method, f"https://{self.donor}{request.path}", headers=headers
            ) as answer,
        ):
            body = await answer.read()
            if request.path == m.NONCE_PATH and self.claims:
                info = m.decode_body(body, m.NonceInfo)
                body = m.encode(m.NonceInfo(nonce=info.nonce, certificate=self.claims.hex()))
            proof = {
                name: answer.headers[name]
                for name in (auth.PROOF_HEADER,)
                if name in answer.headers
            }
            return web.Response(body=body, status=answer.status, headers=proof)


def _connector() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(ssl=client_context(), force_close=True)


@contextlib.asynccontextmanager
async def relayed(donor: HostPort, claims: bytes = b"") -> AsyncIterator[Relay]:
    relay = Relay(donor, claims)
    app = web.Application()
    app.router.add_get(m.SESSION_PATH, relay.session)
    app.router.add_route("*", "/{path:.*}", relay.http)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=hostile_tls().context).start()
        relay.address = HostPort("127.0.0.1", runner.addresses[0][1])
        yield relay
    finally:
        await runner.cleanup()


def got_nothing(w: World) -> None:
    assert not w.donor.server.sessions
    assert w.store.stats()["leases"] == 0
    assert not w.donor.service.drain.is_active


async def test_a_relayed_handshake_fails_at_both_ends() -> None:
    async with world() as w, relayed(w.address) as relay, asyncio.timeout(WAIT_S):
        with pytest.raises(WrongSecretError, match="the cluster secrets differ"):
            await connect(relay.address, IDENTITY, client_config(), Handler())
        assert w.donor.server.counters["secret_errors"] == 1
        assert w.donor.server.counters["sessions_opened"] == 0
        kinds = [type(message) for message in relay.heard]
        assert kinds[:3] == [m.Hello, m.Challenge, m.Auth]
        assert m.Welcome not in kinds
        got_nothing(w)


async def test_a_donor_that_knows_no_secret_and_welcomes_is_not_believed() -> None:
    """The relay cannot use what the donor says: it makes a welcome up."""
    async with world() as w, relayed(w.address) as relay, asyncio.timeout(WAIT_S):
        forward = relay._forward

        async def forged(source: Any, target: Any, decode: Callable[[str], Any]) -> None:
            if decode is m.decode_to_donor:
                await forward(source, target, decode)
                return
            async for message in source:
                said = decode(message.data)
                if isinstance(said, m.Goodbye):
                    auth_said = next(each for each in relay.heard if isinstance(each, m.Auth))
                    welcome = w.donor.service.welcome(2, auth_said.proof)  # reflected
                    await target.send_str(m.encode(welcome).decode())
                else:
                    await target.send_str(message.data)

        relay._forward = forged  # type: ignore[method-assign]
        with pytest.raises(WrongSecretError, match="does not prove"):
            await connect(relay.address, IDENTITY, client_config(), Handler())
        got_nothing(w)


ASK: dict[str, Callable[[HostPort], Awaitable[object]]] = {
    "status": lambda address: fetch_status(address, client_config()),
    "drain": lambda address: set_draining(address, client_config(), True),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_relayed_request_fails_at_both_ends(
    ask: Callable[[HostPort], Awaitable[object]],
) -> None:
    own = hostile_tls().digest
    async with world() as w, asyncio.timeout(WAIT_S):
        # It says the truth about its certificate: the donor refuses the proof.
        async with relayed(w.address, own) as relay:
            with pytest.raises(WrongSecretError, match="differ"):
                await ask(relay.address)
            assert relay.authorizations
            assert w.donor.server.counters["http_unauthorized"] == 1
        # It claims the donor's: the proof does not leave the consumer.
        async with relayed(w.address) as relay:
            with pytest.raises(WrongSecretError, match="another certificate"):
                await ask(relay.address)
            assert not relay.authorizations
        got_nothing(w)


async def test_a_proof_for_the_donor_is_not_sent_to_who_answers_next() -> None:
    """The nonce came from the donor itself, byte by byte; the second connection does not."""
    async with world() as w, relayed(w.address) as relay, asyncio.timeout(WAIT_S):
        connections = 0

        async def splice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            target = w.address if connections == 1 else relay.address
            there = await asyncio.open_connection(target.host, target.port)
            await asyncio.gather(_pipe(reader, there[1]), _pipe(there[0], writer))

        async with await asyncio.start_server(splice, "127.0.0.1", 0) as listener:
            address = HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
            with pytest.raises(WrongSecretError, match="another certificate"):
                await set_draining(address, client_config(), True)
        assert connections == 2
        assert not relay.authorizations
        got_nothing(w)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_what_is_on_the_wire_is_tls() -> None:
    """A consumer begins with TLS: a listener that knows nothing sees no word of the protocol."""
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read(65_536))
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as listener:
        address = HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
        for attempt in (
            connect(address, IDENTITY, client_config(), Handler()),
            fetch_status(address, client_config()),
        ):
            with pytest.raises(Exception, match="control port"):
                await attempt
    assert seen[0] == FIRST_BYTE
    assert IDENTITY.device_id.encode() not in seen
    assert m.SESSION_PATH.encode() not in seen


async def test_an_older_tls_is_refused() -> None:
    older = client_context()
    older.minimum_version = ssl.TLSVersion.TLSv1_2
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    async with world() as w:
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=older)) as http:
                await http.get(f"https://{w.address}{m.VERSION_PATH}")
        async with raw(w) as ws:
            assert ws.get_extra_info("ssl_object").version() == "TLSv1.3"
