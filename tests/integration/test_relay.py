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
from infiniswap.control.own_certificate import new_certificate
from infiniswap.control.tls import FIRST_BYTE, client_context, server_tls
from infiniswap.errors import NoDonorError, ProtocolMismatchError, WrongSecretError
from infiniswap.units import HostPort


class Relay:
    """Ends TLS with a certificate of its own, and says to each end what the other one said.

    Attributes:
        address: where consumers find it.
        heard: every message, of both ends.
        authorizations: the proofs that it was sent.
    """

    def __init__(self, donor: HostPort) -> None:
        self.donor = donor
        self.address = HostPort("127.0.0.1", 0)
        self.heard: list[Any] = []
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
            proof = {
                name: answer.headers[name]
                for name in (auth.PROOF_HEADER,)
                if name in answer.headers
            }
            return web.Response(body=body, status=answer.status, headers=proof)


def _connector() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(ssl=client_context(), force_close=True)


@contextlib.asynccontextmanager
async def relayed(donor: HostPort) -> AsyncIterator[Relay]:
    relay = Relay(donor)
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
    async with world() as w, relayed(w.address) as relay, asyncio.timeout(WAIT_S):
        with pytest.raises(WrongSecretError, match="differ"):
            await ask(relay.address)
        assert relay.authorizations
        assert w.donor.server.counters["http_unauthorized"] == 1
        got_nothing(w)


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_proof_for_the_donor_is_not_sent_to_who_answers_next(
    ask: Callable[[HostPort], Awaitable[object]],
) -> None:
    """The nonce came from the donor itself, byte by byte, and then the connection ended. Whoever
    has the next one could use a proof under the donor's certificate. (What only asks, aiohttp would
    ask again there by itself.)"""
    async with world() as w, relayed(w.address) as relay, asyncio.timeout(WAIT_S):
        connections = 0

        async def splice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            target = w.address if connections == 1 else relay.address
            there, onward = await asyncio.open_connection(target.host, target.port)
            said = 0

            async def forward() -> None:
                nonlocal said
                while data := await reader.read(65_536):
                    said += 1
                    onward.write(data)

            forwarding = asyncio.create_task(forward())
            while data := await there.read(65_536):
                writer.write(data)
                # A hello, then a request: this is the nonce.
                if connections == 1 and said >= 2:
                    break
            forwarding.cancel()
            onward.close()
            writer.close()

        async with await asyncio.start_server(splice, "127.0.0.1", 0) as listener:
            address = HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
            with pytest.raises((NoDonorError, ProtocolMismatchError), match="closed"):
                await ask(address)
        assert connections == 1
        assert not relay.authorizations
        got_nothing(w)


class Splice:
    """Forwards raw TCP to a donor, and keeps what it sees.

    Attributes:
        address: where consumers find it; another one than the donor's.
        seen: every byte, of both ends.
    """

    def __init__(self, donor: HostPort) -> None:
        self.address = HostPort("127.0.0.2", 0)
        self.seen = bytearray()
        self._donor = donor

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Splice]:
        async with await asyncio.start_server(self._forward, self.address.host, 0) as listener:
            self.address = HostPort(self.address.host, listener.sockets[0].getsockname()[1])
            yield self

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection(self._donor.host, self._donor.port)
        await asyncio.gather(self._pipe(reader, onward), self._pipe(there, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                self.seen += data
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_nothing_that_is_said_is_on_the_wire_in_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole session, a status and a drain, seen by somebody on the path."""
    said: list[str] = []

    def heard(prove: Callable[..., str]) -> Callable[..., str]:
        def proof(*args: Any) -> str:
            said.append(prove(*args))
            return said[-1]

        return proof

    for name in ("consumer_proof", "donor_proof", "http_proof", "http_donor_proof"):
        monkeypatch.setattr(auth, name, heard(getattr(auth, name)))
    async with (
        world() as w,
        Splice(w.address).running() as splice,
        asyncio.timeout(WAIT_S),
    ):
        async with await connect(splice.address, IDENTITY, client_config(), Handler()) as session:
            lease = await session.lease(1)
            said += [lease.reclaim, session.welcome.incarnation]
            said += await session.tickets(lease.lease, 0, 1)
            await session.map(lease.lease, 0)
        status = await fetch_status(splice.address, client_config())
        said += [status.donor_id, IDENTITY.device_id]
        await set_draining(splice.address, client_config(), True)
        assert w.donor.service.drain.is_active
    assert splice.seen[0] == FIRST_BYTE
    assert len(said) >= 4 * 2 + 5
    said += [m.SESSION_PATH, m.STATUS_PATH, m.DRAIN_PATH, "Authorization", "ticket", "proof"]
    for text in said:
        assert text.encode() not in splice.seen, text
        assert len(text) < 32 or bytes.fromhex(text.replace("-", "")) not in splice.seen, text


async def test_whoever_forwards_bytes_is_on_the_path_and_no_more() -> None:
    """Without the secret, named as a donor: the session and the drain are the real donor's, which
    says who it is. But the consumer dials data connections at the address that it knows, so they
    lead through the forwarder."""
    async with (
        world(daemon__name="real") as w,
        Splice(w.address).running() as splice,
        asyncio.timeout(WAIT_S),
    ):
        identity = w.donor.service.identity
        async with await connect(splice.address, IDENTITY, client_config(), Handler()) as session:
            assert session.welcome.donor_id == identity.donor_id
            assert session.data_address == HostPort("127.0.0.2", w.donor.ports.data_port)
            # What it has recorded opens no session, and is no request.
            recorded = bytes(splice.seen)
            reader, writer = await asyncio.open_connection(w.address.host, w.address.port)
            writer.write(recorded)
            while await reader.read(65_536):
                pass
            writer.close()
            assert len(w.donor.server.sessions) == 1
        info = await set_draining(splice.address, client_config(), True)
        assert (info.donor_id, info.donor_name) == (identity.donor_id, "real")


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


OPEN: dict[str, Callable[[HostPort], Awaitable[object]]] = {
    "session": lambda address: connect(address, IDENTITY, client_config(), Handler()),
}


@pytest.mark.parametrize("ask", (ASK | OPEN).values(), ids=ASK | OPEN)
async def test_a_donor_with_an_older_tls_gets_no_request(
    ask: Callable[[HostPort], Awaitable[object]],
) -> None:
    tls = server_tls(new_certificate())
    tls.context.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.context.maximum_version = ssl.TLSVersion.TLSv1_2
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=m.encode(m.NonceInfo(nonce="0" * 64)))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.context).start()
        address = HostPort("127.0.0.1", runner.addresses[0][1])
        with pytest.raises(ProtocolMismatchError, match="not an Infiniswap control port"):
            await ask(address)
        assert not asked
        for _ in range(16):  # until its end has noticed
            await asyncio.sleep(0)
    finally:
        await runner.cleanup()
