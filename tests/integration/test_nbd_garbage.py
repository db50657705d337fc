# SPDX-License-Identifier: Apache-2.0
"""A donor's port fed garbage: an NBD error or a closed connection; the next client is served."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.devices.nbd_bytes import (
    ABORT,
    ACK,
    DISC,
    EINVAL,
    FLAGS,
    GO,
    GREETING,
    LIST,
    READ,
    REPLY_MAGIC,
    REQUEST_MAGIC,
    TRIM,
    WRITE,
    open_export,
    option,
    receive,
    reply,
    request,
    say,
)
from support.donors.lent_store import WAIT_S, LentStore, lent_store

pytestmark = pytest.mark.requires_native


@pytest.fixture(scope="module")
def lent() -> Iterator[LentStore]:
    with lent_store(slab_bytes=65536, slots=3) as store:
        yield store


def opened(lent: LentStore) -> socket.socket:
    """A connection past GO."""
    client = lent.dial()
    assert open_export(client, lent.token) == ACK
    return client


def still_serves(lent: LentStore) -> None:
    """A good client is answered, with its own bytes."""
    data = os.urandom(4096)
    with opened(lent) as client:
        client.sendall(request(WRITE, 8192, 4096, cookie=7) + data)
        assert reply(client) == (0, 7)
        client.sendall(request(READ, 8192, 4096, cookie=8))
        assert reply(client) == (0, 8)
        assert receive(client, 4096) == data
        client.sendall(request(DISC))


def until_gone(lent: LentStore) -> None:
    """Nothing that the clients held is held any more."""
    end_s = time.monotonic() + WAIT_S
    while lent.store.stats()["connections"]:
        assert time.monotonic() < end_s, "connections outlive their clients"
        time.sleep(0.01)


HANDSHAKES = {
    "nothing": b"",
    "half the flags": FLAGS[:2],
    "unknown flags": b"\xff\xff\xff\xff",
    "http": b"GET / HTTP/1.1\r\nHost: donor\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "wrong option magic": FLAGS + struct.pack(">QII", 1, GO, 0),
    "the reply's magic": FLAGS + struct.pack(">QII", REPLY_MAGIC, GO, 0),
    "an endless option": FLAGS + option(99, length=0xFFFFFFFF) + bytes(100_000),
    "an option cut short": FLAGS + option(GO, b"abc", length=4000),
    "a name longer than its option": FLAGS + option(GO, struct.pack(">I", 0xFFFFFFFF) + b"xx"),
    "more infos than there are": FLAGS + option(GO, struct.pack(">IH", 0, 0xFFFF)),
    "an empty GO": FLAGS + option(GO),
    "a thousand options": FLAGS + option(LIST) * 1000,
    "a thousand unknown options": FLAGS + option(0xABCDEF, bytes(64)) * 1000,
    "zeros": bytes(1 << 16),
    "ones": b"\xff" * (1 << 16),
}


@pytest.mark.parametrize("what", HANDSHAKES)
@pytest.mark.parametrize("leave", ["close", "half-close", "reset"])
def test_handshake(lent: LentStore, what: str, leave: str) -> None:
    with lent.dial() as client:
        say(client, HANDSHAKES[what])
        if leave == "half-close":
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            while receive(client, 4096):
                pass
        elif leave == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until_gone(lent)
    still_serves(lent)


def test_a_client_that_aborts_is_no_error(lent: LentStore) -> None:
    until_gone(lent)
    before = lent.store.stats()["protocol_errors"]
    with lent.dial() as client:
        receive(client, len(GREETING))
        client.sendall(FLAGS + option(ABORT))
        assert struct.unpack(">QIII", receive(client, 20)) == (REPLY_MAGIC, ABORT, ACK, 0)
        assert receive(client, 1) == b""
    until_gone(lent)
    assert lent.store.stats()["protocol_errors"] == before


STREAMS: dict[str, Callable[[], bytes]] = {
    "wrong magic": lambda: request(READ, 0, 4096, magic=0x12345678),
    "a reply": lambda: struct.pack(">IIQ", 0x67446698, 0, 1) + bytes(12),
    "http": lambda: b"GET / HTTP/1.1\r\nHost: donor\r\n\r\n",
    "a write of 4 GiB": lambda: request(WRITE, 0, 0xFFFFFFFF) + bytes(100_000),
    "a write just over the limit": lambda: request(WRITE, 0, (32 << 20) + 1),
}


@pytest.mark.parametrize("what", STREAMS)
def test_broken_streams_are_closed_and_counted(lent: LentStore, what: str) -> None:
    until_gone(lent)
    before = lent.store.stats()["protocol_errors"]
    with opened(lent) as client:
        say(client, STREAMS[what]())
        assert receive(client, 1) == b""
    until_gone(lent)
    assert lent.store.stats()["protocol_errors"] == before + 1
    still_serves(lent)


REFUSED = {
    "read past the end": request(READ, 3 * 65536, 4096),
    "read over the end": request(READ, 3 * 65536 - 4096, 8192),
    "read at the end of numbers": request(READ, 2**64 - 4096, 8192),
    "read of nothing": request(READ, 0, 0),
    "read of 4 GiB": request(READ, 0, 0xFFFFFFFF),
    "unknown flags": request(READ, 0, 4096, flags=0xFFFE),
    "unknown command": request(77, 0, 4096),
    "trim past the end": request(TRIM, 2**63, 4096),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_requests_get_an_error_and_no_more(lent: LentStore, what: str) -> None:
    with opened(lent) as client:
        client.sendall(REFUSED[what])
        assert reply(client) == (EINVAL, 1)
        client.sendall(request(READ, 0, 512, cookie=2))
        assert reply(client) == (0, 2)
        assert len(receive(client, 512)) == 512


@pytest.mark.parametrize(
    "said",
    [
        request(READ)[:13],
        request(WRITE, 0, 4096),
        request(WRITE, 0, 4096) + bytes(100),
        request(READ, 0, 4096) * 1000,
        request(READ, 0, 65536) * 1000,
    ],
    ids=["half a header", "no payload", "half a payload", "no ear", "no ear for much"],
)
def test_silence_holds_nobody_up(lent: LentStore, said: bytes) -> None:
    """A client that stops in the middle, or never reads: others are served, it can be left."""
    with opened(lent) as silent:
        silent.sendall(said)
        still_serves(lent)
        still_serves(lent)
    until_gone(lent)


def test_a_handshake_has_a_deadline() -> None:
    with lent_store(slab_bytes=65536, slots=2, handshake_ms_max=1000) as lent:
        with lent.dial() as silent, lent.dial() as half:
            half.sendall(FLAGS + option(GO, length=30)[:10])
            for client in (silent, half):
                assert receive(client, 4096).startswith(GREETING)
                assert receive(client, 1) == b""
        until_gone(lent)
        assert lent.store.stats()["protocol_errors"] == 2
        still_serves(lent)


FUZZ = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

EDGES = [0, 1, 2, 511, 4095, 4096, 65535, 65536, 2**31, 2**32 - 1]
numbers32 = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1))
numbers64 = st.one_of(st.sampled_from([*EDGES, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


def drop(client: socket.socket, data: bytes) -> None:
    """Says it all, then listens to the end, which must come."""
    say(client, data)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
    while receive(client, 65536):
        pass


@FUZZ
@given(data=st.binary(max_size=4096))
def test_random_bytes_instead_of_a_handshake(lent: LentStore, data: bytes) -> None:
    with lent.dial() as client:
        drop(client, data)
    still_serves(lent)


@st.composite
def options(draw: st.DrawFn) -> bytes:
    payload = draw(st.binary(max_size=200))
    true = st.just(len(payload))
    number = draw(st.one_of(st.integers(0, 12).filter(lambda n: n != 1), numbers32))
    return option(number, payload, draw(st.one_of(true, true, true, numbers32)))


@FUZZ
@given(said=st.lists(options(), max_size=20))
def test_random_options(lent: LentStore, said: list[bytes]) -> None:
    with lent.dial() as client:
        drop(client, FLAGS + b"".join(said))
    still_serves(lent)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    head = request(
        draw(st.one_of(st.integers(0, 8), st.integers(0, 65535))),
        draw(numbers64),
        draw(numbers32),
        flags=draw(st.one_of(st.just(0), st.integers(0, 65535))),
        cookie=draw(numbers64),
        magic=draw(st.sampled_from([REQUEST_MAGIC] * 20 + [0])),
    )
    return head + draw(st.binary(max_size=300))


@FUZZ
@given(said=st.lists(requests(), max_size=20))
def test_random_requests(lent: LentStore, said: list[bytes]) -> None:
    with opened(lent) as client:
        drop(client, b"".join(said))
    still_serves(lent)
