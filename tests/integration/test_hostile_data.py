# SPDX-License-Identifier: Apache-2.0
"""A donor's data port against clients that want its memory, its time or somebody else's bytes.

Malformed sessions one by one: test_nbd_garbage.py. Here: quantity, patience, and neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.nbd_bytes import (
    ACK,
    DISC,
    EINVAL,
    EIO,
    ENOSPC,
    ERR_POLICY,
    ERR_UNKNOWN,
    EXPORT_NAME,
    FLAGS,
    GO,
    GREETING,
    INFO,
    LIST,
    READ,
    TRIM,
    WRITE,
    ZEROES,
    go,
    negotiate,
    open_export,
    option,
    option_reply,
    read,
    receive,
    reply,
    request,
    say,
    write,
)
from support.donors.lent_store import WAIT_S, LentStore, lent_store

pytestmark = pytest.mark.requires_native

SLAB = 65_536
SHORT_MS = 1000
"""A deadline that tests wait for, and that good neighbours keep on a slow machine, too."""


def opened(lent: LentStore, host: str = "127.0.0.1", token: str = "") -> socket.socket:
    """A connection past GO."""
    client = lent.dial(host)
    assert open_export(client, token or lent.token) == ACK
    return client


def still_serves(lent: LentStore, host: str = "127.0.0.1") -> None:
    data = os.urandom(4096)
    with opened(lent, host) as client:
        assert write(client, 4096, data) == 0
        assert read(client, 4096, 4096) == data
        client.sendall(request(DISC))


def until(condition: object, what: str) -> None:
    assert callable(condition)
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for: {what}"
        time.sleep(0.01)


def until_gone(lent: LentStore) -> None:
    until(lambda: lent.store.stats()["connections"] == 0, "the end of every connection")


def ends(client: socket.socket) -> bool:
    """Whether the other end closes, whatever it says before; fails the test if it does nothing."""
    while receive(client, 4096):
        pass
    return True


def dribble(client: socket.socket, data: bytes) -> int:
    """A byte now and then, until it is all out or the other end has closed; how many were said."""
    client.settimeout(SHORT_MS / 1000 / 20)
    for count, byte in enumerate(data):
        if not say(client, bytes([byte])):
            return count
        with contextlib.suppress(TimeoutError):
            try:
                if client.recv(65_536) == b"":
                    return count
            except ConnectionError:
                return count
    return len(data)


# ------------------------------------------------------------------------ bad requests


@pytest.mark.parametrize("command", [READ, WRITE, TRIM, ZEROES])
@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (3 * SLAB, 4096),
        (3 * SLAB - 4096, 8192),
        (3 * SLAB - 1, 2),
        (2**63, 4096),
        (2**64 - 1, 1),
        (2**64 - 1, 4096),
        (2**64 - 4096, 4096),
        (2**64 - 4096, 8192),
    ],
)
def test_nothing_lies_past_the_end(command: int, offset: int, length: int) -> None:
    with lent_store(slab_bytes=SLAB, slots=3) as lent, opened(lent) as client:
        payload = b"x" * length if command == WRITE else b""
        client.sendall(request(command, offset, length, cookie=9) + payload)
        expected = ENOSPC if command in (WRITE, ZEROES) else EINVAL
        assert reply(client) == (expected, 9)
        assert read(client, 0, 2 * SLAB) == EINVAL  # over a border: two slots, two fences
        for slot in range(2):
            assert read(client, slot * SLAB, SLAB) == bytes(SLAB)


@pytest.mark.parametrize("command", [READ, TRIM, ZEROES])
@pytest.mark.parametrize("length", [SLAB + 1, 2**31, 2**32 - 1])
def test_oversize_lengths_get_an_error(command: int, length: int) -> None:
    with lent_store(slab_bytes=SLAB, slots=3) as lent, opened(lent) as client:
        client.sendall(request(command, 0, length, cookie=9))
        error, cookie = reply(client)
        assert (error, cookie) != (0, 9)
        assert error in (EINVAL, ENOSPC)
        still_serves(lent)


# --------------------------------------------------------------------------- endlessness


def test_a_million_options_are_not_answered() -> None:
    with lent_store(slab_bytes=SLAB, slots=2) as lent:
        with lent.dial() as client:
            assert receive(client, len(GREETING)) == GREETING
            client.sendall(FLAGS)
            answered = threading.Event()
            heard: list[int] = []

            def listen() -> None:
                with contextlib.suppress(struct.error):
                    while True:
                        option_reply(client)
                        heard.append(1)
                answered.set()

            listener = threading.Thread(target=listen)
            listener.start()
            for _ in range(1000):
                if not say(client, option(LIST) * 1000):
                    break
            assert answered.wait(WAIT_S)
            listener.join()
            assert len(heard) <= 64
        until_gone(lent)
        assert lent.store.stats()["protocol_errors"] == 1
        still_serves(lent)


def test_a_handshake_that_dribbles_ends_at_its_deadline() -> None:
    with lent_store(slab_bytes=SLAB, slots=2, handshake_ms_max=SHORT_MS) as lent:
        with lent.dial() as client:
            said = FLAGS + option(LIST) * 1000
            assert dribble(client, said) < len(said)
        until_gone(lent)
        assert lent.store.stats()["protocol_errors"] == 1
        still_serves(lent)


@pytest.mark.parametrize(
    "begun",
    [
        request(READ, 0, 4096)[:1],
        request(WRITE, 0, 60_000),
        request(WRITE, 2**40, 60_000),
        request(READ, 0, 4096) + request(WRITE, 0, 60_000),
    ],
    ids=["a header", "a payload", "an unwanted payload", "after a good one"],
)
@pytest.mark.parametrize("then", ["silence", "dribble"])
def test_a_request_that_never_ends_ends_its_connection(begun: bytes, then: str) -> None:
    with lent_store(slab_bytes=SLAB, slots=2, send_ms_max=SHORT_MS) as lent:
        with opened(lent) as client:
            client.sendall(begun)
            if then == "dribble":
                rest = b"\0" * 50_000
                assert dribble(client, rest) < len(rest)
            else:
                assert ends(client)
        until_gone(lent)
        assert lent.store.stats()["protocol_errors"] == 1
        still_serves(lent)


def test_between_requests_a_client_may_be_silent() -> None:
    with lent_store(slab_bytes=SLAB, slots=2, send_ms_max=50) as lent, opened(lent) as client:
        for _ in range(3):
            assert write(client, 0, b"x" * 512) == 0
            time.sleep(0.3)  # several times the deadline: one that holds here fails the next
        assert read(client, 0, 512) == b"x" * 512
        assert lent.store.stats()["protocol_errors"] == 0


def test_half_a_write_does_not_keep_its_slab() -> None:
    with lent_store(slab_bytes=SLAB, slots=2) as lent:
        with opened(lent) as client:
            client.sendall(request(WRITE, 0, SLAB) + b"x" * 100)
            time.sleep(0.1)  # so that it has begun; if it has not, it is refused, and times out
            mapped = lent.mapped.pop()
            # The deadline of the request is a long way off; that of the unmap counts.
            lent.store.unmap(lent.lease, mapped.slot, mapped.generation, 50)
            assert ends(client)
        assert lent.store.scrub()
        again = lent.store.map(lent.lease)
        assert again is not None
        lent.mapped.append(again)
        with opened(lent) as client:
            assert read(client, again.slot * SLAB, SLAB) == bytes(SLAB)


def test_a_client_that_never_reads_loses_its_connection_and_its_hold() -> None:
    with (
        lent_store(slab_bytes=1 << 20, slots=2, send_ms_max=SHORT_MS) as lent,
        opened(lent) as deaf,
    ):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(request(READ, 0, 1 << 20) * 500)
        until_gone(lent)
        mapped = lent.mapped.pop()
        lent.store.unmap(lent.lease, mapped.slot, mapped.generation, 0)


# ------------------------------------------------------------------------------ quantity


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@contextlib.contextmanager
def closing() -> Iterator[list[socket.socket]]:
    clients: list[socket.socket] = []
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def test_ten_thousand_connections_of_one_host_take_its_places_only() -> None:
    most = 16
    with (
        lent_store(slab_bytes=SLAB, slots=2, connections_per_host_max=most) as lent,
        closing() as held,
    ):
        before = threads()
        for _ in range(10_000):
            client = lent.dial()
            if receive(client, len(GREETING)):
                held.append(client)
            else:
                client.close()
        assert len(held) == most
        stats = lent.store.stats()
        assert stats["connections"] == most
        assert stats["connections_refused"] == 10_000 - most
        assert threads() - before <= most
        # Other hosts do not notice; ours is served again as soon as it lets go.
        still_serves(lent, "127.0.0.2")
        held.pop().close()
        until(lambda: lent.store.stats()["connections"] < most, "the end of a connection")
        still_serves(lent)


def test_connections_that_say_nothing_make_room_at_their_deadline() -> None:
    most = 8
    limits = {"connections_per_host_max": most, "connections_max": most}
    with (
        lent_store(slab_bytes=SLAB, slots=2, handshake_ms_max=SHORT_MS, **limits) as lent,
        closing() as held,
    ):
        for _ in range(most):
            held.append(lent.dial())
            assert receive(held[-1], len(GREETING)) == GREETING
        for client in held:
            assert ends(client)
        until_gone(lent)
        still_serves(lent)


def test_many_hosts_share_what_there_is() -> None:
    limits = {"connections_per_host_max": 4, "connections_max": 20}
    with lent_store(slab_bytes=SLAB, slots=2, **limits) as lent, closing() as held:
        for host, _ in itertools.product(range(1, 11), range(10)):
            client = lent.dial(f"127.0.0.{host}")
            if receive(client, len(GREETING)):
                held.append(client)
            else:
                client.close()
        assert len(held) == 20
        assert lent.store.stats()["connections"] == 20
        while held:
            held.pop().close()
        until_gone(lent)
        still_serves(lent, "127.0.0.10")


def test_one_lease_has_so_many_connections_and_no_more() -> None:
    with lent_store(slab_bytes=SLAB, slots=2, connections_per_lease_max=3) as lent:
        other = lent.store.lease_create(1)
        with closing() as held:
            held.extend(opened(lent, f"127.0.0.{host}") for host in range(1, 4))
            with lent.dial("127.0.0.9") as surplus:
                assert open_export(surplus, lent.token) == ERR_POLICY
                # The same connection may still want something else.
                assert negotiate(surplus, go(other.token)) == ACK
        until_gone(lent)
        still_serves(lent)


# ---------------------------------------------------------------------------- neighbours


@pytest.fixture
def two_leases() -> Iterator[tuple[LentStore, str, bytes]]:
    """A store with a lease of ours, a neighbour's token, and the bytes in its slab."""
    with lent_store(slab_bytes=SLAB, slots=3, slabs_max=4) as lent:
        lent.store.preallocate()
        lent.store.preallocate()
        neighbour = lent.store.lease_create(3)
        assert lent.store.map(neighbour.lease) is not None
        secret = os.urandom(SLAB)
        with opened(lent, token=neighbour.token) as owner:
            assert write(owner, 0, secret) == 0
        yield lent, neighbour.token, secret


def test_no_name_but_the_token_opens_an_export(two_leases: tuple[LentStore, str, bytes]) -> None:
    lent, token, _ = two_leases
    wrong = [
        "",
        token[:-1],
        token + "0",
        token + "\0",
        token.upper() if token != token.upper() else token.lower() + " ",
        token[::-1] if token != token[::-1] else "x" * 32,
        " " + token[1:],
        "\0" * 32,
        "0" * 32,
        lent.token[:16] + token[16:],
        "default",
        "/" + token,
        "../" + token,
        "x" * 4096,
    ]
    with lent.dial() as client:
        assert receive(client, len(GREETING)) == GREETING
        client.sendall(FLAGS)
        for name in wrong:
            for number in (GO, INFO):
                assert negotiate(client, go(name, number=number)) == ERR_UNKNOWN, repr(name)
    for name in wrong:
        with lent.dial() as client:
            assert receive(client, len(GREETING)) == GREETING
            client.sendall(FLAGS + option(EXPORT_NAME, name.encode()))
            assert receive(client, 1) == b""
    until_gone(lent)


def test_exports_are_not_listed(two_leases: tuple[LentStore, str, bytes]) -> None:
    lent, _, _ = two_leases
    with lent.dial() as client:
        assert receive(client, len(GREETING)) == GREETING
        client.sendall(FLAGS + option(LIST))
        assert option_reply(client) == (LIST, ACK, b"")


def test_no_offset_reaches_a_neighbour(two_leases: tuple[LentStore, str, bytes]) -> None:
    lent, token, secret = two_leases
    with opened(lent) as client:
        # Its own slots hold zeros; whatever else there is must be an error.
        for offset in [
            *range(0, 8 * SLAB, SLAB // 2),
            *(2**bits - SLAB // 2 for bits in range(17, 65)),
            *(-SLAB * slabs % 2**64 for slabs in range(1, 9)),
        ]:
            answer = read(client, offset, SLAB // 2)
            if offset < 2 * SLAB:
                assert answer == bytes(SLAB // 2)
            else:
                assert answer in (EINVAL, EIO), offset
                assert write(client, offset, b"!" * 512) in (EINVAL, EIO, ENOSPC)
                client.sendall(request(ZEROES, offset, 512, cookie=4))
                assert reply(client)[0] in (EINVAL, EIO, ENOSPC)
    with opened(lent, token=token) as owner:
        assert read(owner, 0, SLAB) == secret


def test_a_slab_that_changes_hands_is_empty_and_out_of_reach(
    two_leases: tuple[LentStore, str, bytes],
) -> None:
    lent, token, _ = two_leases
    data = os.urandom(SLAB)
    with opened(lent) as ours, opened(lent, token=token) as theirs:
        for _ in range(20):
            mapped = lent.mapped.pop()
            at = mapped.slot * SLAB
            assert write(ours, at, data) == 0
            lent.store.unmap(lent.lease, mapped.slot, mapped.generation, 1000)
            # The connection lives on and must not see the slab any more.
            assert read(ours, at, SLAB) == EIO
            assert write(ours, at, data) == EIO
            while lent.store.scrub():
                pass
            for slot in range(3):
                answer = read(theirs, slot * SLAB, SLAB)
                assert answer == EIO or data[:512] not in bytes(answer)
            again = lent.store.map(lent.lease)
            assert again is not None
            lent.mapped.append(again)
            assert read(ours, again.slot * SLAB, SLAB) == bytes(SLAB)


def test_an_old_token_and_its_connections_are_dead_after_a_renewal(
    two_leases: tuple[LentStore, str, bytes],
) -> None:
    lent, _, _ = two_leases
    with opened(lent) as old:
        fresh = lent.store.lease_renew(lent.lease, 10_000)
        assert ends(old)
    with lent.dial() as client:
        assert open_export(client, lent.token) == ERR_UNKNOWN
        assert negotiate(client, go(fresh)) == ACK
