# SPDX-License-Identifier: Apache-2.0
"""A donor's control port against peers that want its time, its places or somebody else's lease.

Malformed messages one by one: test_control_session.py, tests/fuzz/fuzz_control.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import secrets
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import aiohttp
import pytest
from support.donors.donor_world import (
    WAIT_S,
    World,
    auth_for,
    client_config,
    hello,
    raw,
    say,
    until,
    welcomed,
    world,
)
from support.machine.descriptors import files_allowed

from infiniswap.control import messages as m
from infiniswap.control.channel import LOST, Channel, Limits
from infiniswap.control.client import fetch_status
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.gate import Gate
from infiniswap.control.handshake_rate import OF_STRANGERS, HandshakeRates
from infiniswap.control.rate import Rate
from infiniswap.control.socket_owner import local_user
from infiniswap.control.tls import client_context
from infiniswap.donor.leases import SESSION_LEASES_MAX
from infiniswap.errors import DonorBusyError, RequestRefusedError
from infiniswap.units import KIB

SHORT_S = 0.5
"""A deadline that tests wait for, and that good neighbours keep on a slow machine, too."""

ME = local_user(os.getuid())

OPENING = (
    f"GET {m.SESSION_PATH} HTTP/1.1\r\nHost: donor\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    f"Sec-WebSocket-Key: {base64.b64encode(b'0123456789abcdef').decode()}\r\n"
    f"Sec-WebSocket-Protocol: {m.SUBPROTOCOL}\r\n\r\n"
).encode()


@contextlib.asynccontextmanager
async def dialled(
    w: World, host: str = "127.0.0.1", *, plain: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection without a word said, from that address of the loopback; `plain` without TLS."""
    reader, writer = await asyncio.open_connection(
        w.address.host,
        w.address.port,
        local_addr=(host, 0),
        ssl=None if plain else client_context(),
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def proved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Opens a session, frame by frame."""
    first = hello()
    writer.write(OPENING + frame(m.encode(first)))
    await reader.readuntil(b"\r\n\r\n")
    head = await reader.readexactly(2)
    size = head[1]
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2), "big")
    challenge = m.decode_to_consumer(await reader.readexactly(size))
    assert isinstance(challenge, m.Challenge)
    writer.write(frame(m.encode(auth_for(writer, first, challenge))))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What the other end said before it closed."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65_536):
            said += part
    return said


async def dribble(w: World, begin: bytes, endless: bytes) -> bool:
    """Says `begin`, then a byte now and then; True when the other end closed."""
    async with dialled(w) as (reader, writer):
        writer.write(begin)
        closing = asyncio.create_task(ended(reader))
        for byte in itertools.cycle(endless):
            await asyncio.wait({closing}, timeout=SHORT_S / 20)
            if closing.done():
                return True
            writer.write(bytes([byte]))
        return False


def frame(
    payload: bytes, *, opcode: int = 1, final: bool = True, length: int | None = None
) -> bytes:
    """A WebSocket frame as a client sends it, perhaps with a length that is not its own."""
    size = len(payload) if length is None else length
    head = bytes([opcode | (0x80 if final else 0)])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += struct.pack(">BH", 0x80 | 126, size)
    else:
        head += struct.pack(">BQ", 0x80 | 127, size)
    return head + bytes(4) + payload  # a mask of zeros


# ------------------------------------------------------------------------------ patience


DRIBBLES = {
    "a request line": (b"", b"GET / HTTP/1.1\r\n"),
    "headers": (b"GET / HTTP/1.1\r\n", b"X-Header: x\r\n"),
    "a body": (b"GET /v1/version HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n", b"x"),
    "the second request": (
        b"GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: x\r\n",
    ),
    "a hello": (OPENING, frame(m.encode(hello()))[:2] + b"x"),
    "an auth": (OPENING + frame(m.encode(hello())), frame(b"x" * 4000)),
    "pings": (OPENING, frame(b"x", opcode=9)),
    "fragments": (OPENING, frame(b"x", final=False)),
}


@pytest.mark.parametrize(
    ("begin", "endless"),
    DRIBBLES.values(),
    ids=DRIBBLES,
)
async def test_a_peer_that_dribbles_is_shown_the_door(begin: bytes, endless: bytes) -> None:
    async with world(handshake_s=SHORT_S) as w, asyncio.timeout(WAIT_S):
        assert await dribble(w, begin, endless)
        assert not w.donor.server.sessions
        async with await w.session() as session:
            await session.memory()


@pytest.mark.parametrize("said", [b"\x16", b"\x16\x03\x01\x02\x00", b"\x16\xff" * 300])
async def test_a_tls_handshake_that_does_not_end_is_ended(said: bytes) -> None:
    async with world(handshake_s=SHORT_S) as w, asyncio.timeout(WAIT_S):
        async with dialled(w, plain=True) as (reader, writer):
            writer.write(said)
            answer = await ended(reader)
            assert answer[:1] in (b"", b"\x15")  # an alert of TLS at most
        await until(lambda: not w.donor.server._port._gate.places)
        async with await w.session() as session:
            await session.memory()


async def test_one_deadline_holds_for_first_byte_handshake_and_request() -> None:
    """Each of them alone would come in time."""
    said, heard = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = client_context().wrap_bio(heard, said)
    with pytest.raises(ssl.SSLWantReadError):
        end.do_handshake()
    async with world(handshake_s=SHORT_S) as w, asyncio.timeout(WAIT_S):
        async with dialled(w, plain=True) as (reader, writer):
            closing = None
            with contextlib.suppress(ConnectionError):
                await asyncio.sleep(0.6 * SHORT_S)
                writer.write(said.read(1))
                await asyncio.sleep(0.6 * SHORT_S)
                writer.write(said.read())
                heard.write(await reader.read(65_536))
                with contextlib.suppress(ssl.SSLError):
                    end.do_handshake()
                    end.write(VERSION)
                    writer.write(said.read())
                closing = await ended(reader)
        assert not closing
        assert w.donor.server.counters["connections_idle_closed"] == 1


VERSION = f"GET {m.VERSION_PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def ask_and_never_read(w: World, token: str) -> None:
    """With a proof, until the other end closes."""
    async with dialled(w) as (_reader, writer):
        bearer = f"Authorization: Bearer {token}"
        writer.write(f"GET {METRICS_PATH} HTTP/1.1\r\nHost: x\r\n{bearer}\r\n\r\n".encode())
        cast(Any, writer.transport).pause_reading()
        while not writer.transport.is_closing():
            if writer.transport.get_write_buffer_size() < len(VERSION):
                writer.write(VERSION * 1024)
            await asyncio.sleep(0)


async def test_a_peer_that_asks_and_never_reads_is_left(tmp_path: Path) -> None:
    most, token = 0, tmp_path / "token"
    token.touch(0o600)
    token.write_text("t" * 32)
    async with (
        world(handshake_s=SHORT_S, cluster__metrics_token_file=token) as w,
        asyncio.timeout(WAIT_S),
    ):
        deaf = [asyncio.create_task(ask_and_never_read(w, "t" * 32)) for _ in range(4)]
        server = cast(Any, w.donor.server._port._runner).server
        while not all(task.done() for task in deaf):
            for handler in server.connections:
                if (transport := handler.transport) is not None:
                    kept = transport.get_write_buffer_size() + transport.get_read_buffer_size()
                    most = max(most, kept)
            await asyncio.sleep(SHORT_S / 50)
        await asyncio.gather(*deaf)
        assert w.donor.server.counters["connections_unread_closed"] == len(deaf)
        assert 0 < most < 128 * KIB
        await until(lambda: not w.donor.server._port._gate.places)
        async with await w.session() as session:
            await session.memory()


async def test_a_session_that_dribbles_counts_as_silent() -> None:
    async with (
        world(cluster__heartbeats_missed_max=4) as w,
        asyncio.timeout(WAIT_S),
        dialled(w) as (reader, writer),
    ):
        await proved(reader, writer)
        await until(lambda: bool(w.donor.server.sessions))
        closing = asyncio.create_task(ended(reader))
        while w.donor.server.sessions:
            # WebSocket pings and halves of messages are no heartbeat.
            writer.write(frame(b"x", opcode=9) if secrets.randbelow(2) else b"")
            await asyncio.sleep(0.01)
        assert m.GOODBYE_SILENCE.encode() in await closing


def has_renewed(w: World, lease: int, epoch: int) -> bool:
    return not w.donor.server.sessions or w.store.lease_stats(lease).epoch >= epoch


async def test_a_peer_that_never_reads_is_left() -> None:
    slabs = 500
    async with (
        world(
            cluster__heartbeat_s=1.0,
            cluster__heartbeats_missed_max=100,
            daemon__pool=f"{slabs}M",
        ) as w,
        welcomed(w) as ws,
    ):
        lease = await say(ws, m.LeaseRequest(id=1, slots_max=slabs))
        for slab in range(slabs):
            mapped = await say(ws, m.MapRequest(id=1, lease=lease.lease, slab=slab))
            assert isinstance(mapped, m.MapAnswer)
        # Each wants an answer that names every slab, until no more fit in between; aiohttp stops
        # reading when nobody takes what has come.
        for epoch in range(lease.epoch, w.donor.server._config.limits.requests.burst - slabs):
            request = m.RenewRequest(id=1, lease=lease.lease, reclaim=lease.reclaim, epoch=epoch)
            await ws.send_str(m.encode(request).decode())
            if epoch % 32 == 0:  # not so many at once that they are refused as too many
                await until(partial(has_renewed, w, lease.lease, epoch))
            if not w.donor.server.sessions:
                break
        await until(lambda: not w.donor.server.sessions)
        assert w.donor.server.counters["sessions_ended_lost"] == 1
        async with await w.session() as session:
            await session.memory()


# ------------------------------------------------------------------------------ quantity


async def test_silent_connections_keep_nobody_out_at_their_own_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of an ordinary user of the consumer's host."""
    most = 16
    async with (
        world(daemon__connections_per_host_max=most) as w,
        asyncio.timeout(WAIT_S),
        contextlib.AsyncExitStack() as held,
    ):
        held.enter_context(files_allowed(4096))
        counters, reads = w.donor.server.counters, []
        for _ in range(1000):
            reader, _writer = await held.enter_async_context(dialled(w, plain=True))
            reads.append(asyncio.create_task(ended(reader)))
        await until(lambda: sum(task.done() for task in reads) == 1000 - most)
        assert counters["connections_displaced"] == 1000 - most
        assert f"refused a connection from 127.0.0.1 ({ME}): too many are open" in caplog.text
        for _ in range(12):
            assert (await fetch_status(w.address, client_config())).donor_id
            async with await w.session() as session:
                await session.memory()
        assert counters["connections_refused"] == 0
        assert not all(task.done() for task in reads)  # they are still there
        await held.aclose()
        await asyncio.wait(reads)
        await until(lambda: not w.donor.server._port._gate.places)


async def test_proved_connections_of_one_host_have_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    most = 4
    async with (
        world(daemon__connections_per_host_max=most) as w,
        asyncio.timeout(WAIT_S),
        contextlib.AsyncExitStack() as held,
    ):
        for _ in range(most):
            await held.enter_async_context(await w.session())
        for ask in (w.session, lambda: fetch_status(w.address, client_config())):
            with pytest.raises(DonorBusyError) as caught:
                await ask()
            assert "connections_per_host_max" in caught.value.mend
        assert f"refused a connection from 127.0.0.1 ({ME}): too many are open" in caplog.text
        # Other hosts do not notice.
        async with await w.session(host="10.0.0.2") as other:
            await other.memory()
        await held.aclose()
        await until(lambda: not w.donor.server._port._gate.places)
        async with await w.session() as session:
            await session.memory()


def test_two_connections_from_each_address_are_strangers_still() -> None:
    """They began 827 handshakes a second instead of 100."""

    async def begun() -> int:
        rates = HandshakeRates(of_strangers=Rate(OF_STRANGERS.burst, 0.0))
        gate = Gate(asyncio.Protocol, 4096, 128, Counter(), rates=rates)
        hosts = [f"10.0.{number >> 8}.{number & 255}" for number in range(500)]
        for host in hosts * 2:
            assert gate.enter(host, cast(Any, object()))
        return sum(gate.may_begin_tls(host, host) for host in hosts * 2)

    assert asyncio.run(begun()) == OF_STRANGERS.burst


async def test_a_refused_peer_that_is_gone_already_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever is refused need not wait to be told so."""
    counters = Counter[str]()
    gate = Gate(asyncio.Protocol, 0, 0, counters)
    server = await asyncio.get_running_loop().create_server(gate, "127.0.0.1", 0)
    async with server, asyncio.timeout(WAIT_S):
        for number in range(8):  # each is closed before the loop gets to accept it
            with socket.create_connection(server.sockets[0].getsockname()) as peer:
                if number % 2:  # with a reset; otherwise it comes when the refusal is sent
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: counters["connections_refused"] == 8 and not gate.refused_open)
    assert not [record for record in caplog.records if record.exc_info]


async def test_unproven_sessions_are_bounded_in_number_and_time(secret_file: Path) -> None:
    most = 4
    async with (
        world(
            cluster__secret_file=secret_file, daemon__connections_per_host_max=most, handshake_s=3.0
        ) as w,
        asyncio.timeout(WAIT_S),
        contextlib.AsyncExitStack() as held,
    ):
        waiting = [await held.enter_async_context(raw(w)) for _ in range(most)]
        for ws in waiting:
            assert isinstance(await say(ws, hello()), m.Challenge)
        # Whoever proves itself is let in nevertheless, for the one that waited longest.
        async with await w.session() as session:
            await session.memory()
        assert w.donor.server.counters["connections_displaced"] == 1
        assert (await waiting.pop(0).receive()).type is aiohttp.WSMsgType.CLOSED
        for ws in waiting:
            goodbye = m.decode_to_consumer(await ws.receive_str())
            assert isinstance(goodbye, m.Goodbye)
            assert goodbye.reason == m.GOODBYE_SILENCE
        await until(lambda: not w.donor.server._port._gate.places)


async def test_requests_without_a_proof_do_not_hold_a_place() -> None:
    async with world(handshake_s=SHORT_S) as w, asyncio.timeout(WAIT_S), dialled(w) as (r, writer):
        closing = asyncio.create_task(ended(r))
        while not closing.done():
            writer.write(VERSION)
            await asyncio.sleep(SHORT_S / 20)
        assert b"200 OK" in await closing
        assert w.donor.server.counters["connections_idle_closed"] == 1


async def test_a_flood_of_requests_is_answered_busy_not_queued(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world(cluster__heartbeats_missed_max=100) as w, welcomed(w) as ws:
        w.store.destroyed.clear()  # a release takes until it is set
        lease = await say(ws, m.LeaseRequest(id=1, slots_max=1))
        assert isinstance(lease, m.LeaseAnswer)
        for number in range(500):
            request = m.ReleaseRequest(id=number + 2, lease=lease.lease)
            await ws.send_str(m.encode(request).decode())
        reasons: list[str] = []
        while len(reasons) < 499:
            answer = m.decode_to_consumer(await ws.receive_str())
            if isinstance(answer, m.RefusedAnswer):
                reasons.append(answer.reason)
            if len(reasons) == 500 - w.donor.server._config.limits.handling_max:
                w.store.destroyed.set()
        # One was carried out; those that could wait for it found the lease gone.
        assert reasons.count(m.REFUSED_BUSY) == 500 - w.donor.server._config.limits.handling_max
        assert set(reasons) == {m.REFUSED_BUSY, m.REFUSED_UNKNOWN_LEASE}
        counters = w.donor.server.counters
        assert counters["requests_refused_busy"] == reasons.count(m.REFUSED_BUSY)
    assert f"{w.donor.server._config.limits.handling_max} are under way" in caplog.text


class DeafSocket:
    """A WebSocket whose peer asks again and again, and never reads."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def receive(self) -> aiohttp.WSMessage:
        await asyncio.sleep(0)  # requests arrive one by one
        request = m.encode(m.MemoryRequest(id=1)).decode()
        return aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, request, None)

    async def send_str(self, text: str) -> None:
        self.sent.append(text)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """It does not answer that either, but is not waited for."""


async def test_answers_that_nobody_reads_are_few() -> None:
    ws = DeafSocket()

    async def handle(request: Any) -> m.OkAnswer:
        return m.OkAnswer(id=request.id)

    limits = Limits(heartbeat_s=1e6, send_s=SHORT_S, handling_max=8)
    channel = Channel(
        cast(Any, ws),
        decode=m.decode_to_donor,
        handle=handle,
        notice=lambda message: None,
        peer="a peer that never reads",
        limits=limits,
    )
    ended = await channel.run()
    assert ended.reason == LOST
    # One for each request under way, and the refusal of the one that was too many.
    assert len(ws.sent) == limits.handling_max + 1


async def test_the_leases_of_one_host_leave_room_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world(daemon__leases_max=16) as w, contextlib.AsyncExitStack() as held:
        for _ in range(2):
            greedy = await held.enter_async_context(await w.session(host="10.0.0.66"))
            for _ in range(SESSION_LEASES_MAX):
                await greedy.map((await greedy.lease(1)).lease, 0)
            with pytest.raises(RequestRefusedError, match="its limit"):
                await greedy.lease(1)
        third = await held.enter_async_context(await w.session(host="::ffff:10.0.0.66"))
        with pytest.raises(RequestRefusedError, match=r"10\.0\.0\.66 has 8 leases") as caught:
            await third.lease(1)
        assert caught.value.reason == m.REFUSED_QUOTA
        assert "(10.0.0.66:1): this session has 4 leases" in caplog.text
        async with await w.session(host="10.0.0.1") as other:
            await other.lease(4)


async def test_leases_without_a_slab_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    """One machine with five addresses took all of them, and mapped nothing."""
    caplog.set_level("INFO")
    async with world(daemon__leases_max=16) as w, contextlib.AsyncExitStack() as held:
        for number in range(10):
            many = await w.session(host=f"10.0.0.{66 + number % 5}")
            greedy = await held.enter_async_context(many)
            with contextlib.suppress(RequestRefusedError):
                for _ in range(SESSION_LEASES_MAX):
                    await greedy.lease(1)
        assert len(w.donor.service.table) == 16
        async with await w.session(host="10.0.0.1") as honest:
            lease = await honest.lease(4)
            await greedy.lease(1)  # takes its own, and not that of who has one
            await honest.map(lease.lease, 0)
        assert len(w.donor.service.table) == 16
        assert "had no slab, and another device needs a lease" in caplog.text


# ---------------------------------------------------------------------------------- size


FRAMES = {
    "oversize": frame(b"x" * (m.MESSAGE_BYTES_MAX + 1)),
    "2^63-1": frame(b"x" * 100, length=2**63 - 1),
    "2^63": frame(b"x" * 100, length=2**63),
    "2^40": frame(b"x" * 100, length=2**40),
    "fragments": frame(b"x" * 200_000, final=False)
    + frame(b"x" * 200_000, opcode=0, final=False) * 5,
    "deep objects": frame(b'{"type":' * 100_000),
    "deep lists": frame(b"[" * 500_000),
    "no text": frame(b"\xff\xfe" * 100),
    "binary": frame(b"x", opcode=2),
    "reserved opcode": frame(b"x", opcode=3),
    "long ping": frame(b"x" * 200, opcode=9),
    "ones": b"\xff" * 500,
    "noise": os.urandom(5000),
}


@pytest.mark.parametrize("proven", [False, True], ids=["stranger", "session"])
@pytest.mark.parametrize(
    "said",
    FRAMES.values(),
    ids=FRAMES,
)
async def test_frames_that_no_peer_sends_end_the_session_alone(said: bytes, proven: bool) -> None:
    async with world(handshake_s=1.0) as w, await w.session() as good, asyncio.timeout(WAIT_S):
        async with dialled(w) as (reader, writer):
            if proven:
                await proved(reader, writer)
                await until(lambda: len(w.donor.server.sessions) == 2)
            else:
                writer.write(OPENING)
            writer.write(said)
            await ended(reader)
            await until(lambda: len(w.donor.server.sessions) == 1)
        await good.memory()


async def test_a_stranger_may_say_little() -> None:
    async with world() as w, raw(w) as ws:
        oversize = m.encode(hello())[:-1] + b',"x":"' + b"x" * m.HELLO_BYTES_MAX + b'"}'
        await ws.send_str(oversize.decode())
        goodbye = m.decode_to_consumer(await ws.receive_str())
        assert isinstance(goodbye, m.Goodbye)
        assert goodbye.reason == m.GOODBYE_PROTOCOL


# --------------------------------------------------------------------- others' leases


async def test_a_recorded_session_opens_no_second_one(secret_file: Path) -> None:
    async with world(cluster__secret_file=secret_file, daemon__lease_grace_s=30) as w:
        first = hello()
        async with raw(w) as ws:
            proof = auth_for(ws, first, await say(ws, first))
            assert isinstance(await say(ws, proof), m.Welcome)
            lease = await say(ws, m.LeaseRequest(id=1, slots_max=1))
        async with raw(w) as ws:
            assert isinstance(await say(ws, first), m.Challenge)
            assert isinstance(await say(ws, proof), m.Goodbye)
        assert w.store.lease_stats(lease.lease).epoch == 1


async def test_answers_that_nobody_asked_for_do_nothing() -> None:
    async with world() as w, welcomed(w) as ws:
        for number in (0, 1, 2**53 - 1):
            for answer in (
                m.EvictAnswer(id=number),
                m.ActivityAnswer(id=number, slots=[]),
                m.RefusedAnswer(id=number, reason="x"),
                m.Pong(id=number),
            ):
                await ws.send_str(m.encode(answer).decode())
        assert isinstance(await say(ws, m.MemoryRequest(id=9)), m.MemoryAnswer)


_TARGETS = (
    *(m.STATUS_PATH, m.SESSION_PATH, m.NONCE_PATH, m.VERSION_PATH, m.OPENAPI_PATH, m.DRAIN_PATH),
    *(METRICS_PATH, "/", "*", "//", "/v1/%ff", "/v1/../metrics", "http://x/metrics", "/metrics?"),
)
_HEADERS = (
    *("Authorization", "Sec-WebSocket-Protocol", "Sec-WebSocket-Key", "Sec-WebSocket-Version"),
    *("Upgrade", "Connection", "Content-Length", "Content-Type", "Content-Encoding", "Expect"),
    *("Transfer-Encoding", "Host", "Cookie", "Range", "Accept-Encoding", "If-Modified-Since", "X"),
)
_VALUES = (
    *(b"Bearer ", b"Infiniswap ", b"Infiniswap " + b"0" * 64 + b":", b"Basic ", b"websocket"),
    *(b"13", b"chunked", b"gzip", b"100-continue", b"upgrade", m.SUBPROTOCOL.encode(), b"-1", b""),
)


def junk(random: Random) -> bytes:
    """Some bytes of any kind, without an end of line."""
    made = random.randbytes(random.choice((0, 1, 3, 40)))
    return made.translate(None, b"\r\n") if random.random() < 0.9 else made


def junk_request(random: Random) -> bytes:
    method = random.choice((b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", junk(random)))
    target = random.choice(_TARGETS).encode() + (junk(random) if random.random() < 0.3 else b"")
    lines = [method + b" " + target + b" HTTP/1.1", b"Host: x", b"Connection: close"]
    for _ in range(random.randrange(4)):
        value = random.choice(_VALUES) + random.choice((b"", junk(random)))
        lines.append(random.choice(_HEADERS).encode() + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n" + junk(random)


async def statuses(reader: asyncio.StreamReader) -> set[int]:
    """Of every answer until the other end closes."""
    return {int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3}) ", await ended(reader))}


async def test_no_bytes_of_a_request_are_a_fault_of_ours(
    secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("t" * 32)
    seen: set[int] = set()
    async with world(
        tls_per_host=Rate(1000, 1000.0),
        handshake_s=SHORT_S,
        cluster__secret_file=secret_file,
        cluster__metrics_token_file=token,
    ) as w:
        bearers = (b"Bearer \xff\xfe", b"Bearer \xed\xa0\x80", b"Infiniswap \xff:\xff", b"\xff")
        requests = [
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: %b\r\n\r\n"
            % b
            for b in bearers
        ]
        requests += [junk_request(Random(seed)) for seed in range(600)]
        places = asyncio.Semaphore(8)  # each handshake has half a second

        async def say_it(request: bytes) -> None:
            async with places, dialled(w) as (reader, writer):
                writer.write(request)
                answered = await statuses(reader)
                assert not {code for code in answered if code >= 500}, request
                seen.update(answered)

        # An address that proved itself is not under the rate of strangers.
        await fetch_status(w.address, client_config())
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(say_it(request))
        assert {200, 400, 401, 404} <= seen
        assert "a request failed" not in caplog.text
        assert (await fetch_status(w.address, client_config())).sessions == 0
