# SPDX-License-Identifier: Apache-2.0
"""A donor's data port against clients that want its memory, its time or somebody else's bytes.

Malformed sessions one by one: tests/c/test_nbd_handshake.c, tests/c/test_nbd_memory.c,
tests/fuzz/fuzz_nbd_server.c. Here: quantity, patience, and neighbours.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import until
from support.donors.lent_store import MANY, LentStore, lent_store
from support.machine.descriptors import files_allowed

pytestmark = pytest.mark.requires_native

SLAB = 65_536
SHORT_MS = 1000
"""A deadline that tests wait for, and that good neighbours keep on a slow machine, too."""


def opened(lent: LentStore, host: str = "127.0.0.1", ticket: str = "") -> socket.socket:
    """A connection past GO."""
    client = lent.dial(host)
    assert nbd.open_export(client, ticket or lent.ticket) == nbd.ACK
    return client


def still_serves(lent: LentStore, host: str = "127.0.0.1") -> None:
    data = os.urandom(4096)
    with opened(lent, host) as client:
        assert nbd.write(client, 4096, data) == 0
        assert nbd.read(client, 4096, 4096) == data
        client.sendall(nbd.request(nbd.DISC))


def until_gone(lent: LentStore) -> None:
    until(lambda: lent.store.stats()["connections"] == 0, "the end of every connection")


def ends(client: socket.socket) -> bool:
    """Whether the other end closes, whatever it says before; fails the test if it does nothing."""
    while nbd.receive(client, 4096):
        pass
    return True


def dribble(client: socket.socket, data: bytes) -> int:
    """A byte now and then, until it is all out or the other end has closed; how many were said."""
    client.settimeout(SHORT_MS / 1000 / 20)
    for count, byte in enumerate(data):
        if not nbd.say(client, bytes([byte])):
            return count
        with contextlib.suppress(TimeoutError):
            try:
                if client.recv(65_536) == b"":
                    return count
            except ConnectionError:
                return count
    return len(data)


@pytest.mark.parametrize(
    "begun",
    [
        nbd.request(nbd.READ, 0, 4096)[:1],
        nbd.request(nbd.WRITE, 0, 60_000),
        nbd.request(nbd.WRITE, 2**40, 60_000),
        nbd.request(nbd.READ, 0, 4096) + nbd.request(nbd.WRITE, 0, 60_000),
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
            assert nbd.write(client, 0, b"x" * 512) == 0
            time.sleep(0.3)  # several times the deadline: one that holds here fails the next
        assert nbd.read(client, 0, 512) == b"x" * 512
        assert lent.store.stats()["protocol_errors"] == 0


# ------------------------------------------------------------------------------ quantity


def test_ten_thousand_silent_connections_keep_nobody_out() -> None:
    """As of an ordinary user of the consumer's host: attacker and victim have one address."""
    most = 16
    tasks = Path("/proc/self/task")
    with (
        files_allowed(12_000),
        lent_store(slab_bytes=SLAB, slots=2, connections_per_host_max=most) as lent,
        contextlib.ExitStack() as held,
    ):
        before = len(list(tasks.iterdir()))
        kept = held.enter_context(opened(lent))
        for number in range(10_000):
            client = held.enter_context(lent.dial("127.0.0.2"))
            assert nbd.receive(client, len(nbd.GREETING)) == nbd.GREETING
            if number % 1000 == 999:
                still_serves(lent)
        stats = lent.store.stats()
        assert stats["connections"] <= most + 2  # before GO, and what has opened an export
        assert stats["connections_refused"] >= 10_000 - most
        assert len(list(tasks.iterdir())) - before <= most + 2
        assert nbd.write(kept, 0, b"x" * 512) == 0


def test_connections_with_good_tickets_of_one_host_have_a_limit() -> None:
    most = 4
    with (
        lent_store(slab_bytes=SLAB, slots=2, connections_per_host_max=most) as lent,
        contextlib.ExitStack() as held,
    ):
        first = opened(lent)
        for _ in range(most - 1):
            held.enter_context(opened(lent))
        with lent.dial("127.0.0.2") as surplus:  # all of loopback is one host
            assert nbd.receive(surplus, 1) == b""
        first.close()
        until(lambda: lent.store.stats()["connections"] < most, "the end of a connection")
        still_serves(lent)


def test_connections_that_say_nothing_make_room_at_their_deadline() -> None:
    most = 8
    with (
        lent_store(
            slab_bytes=SLAB, slots=2, handshake_ms_max=SHORT_MS, connections_max=most
        ) as lent,
        contextlib.ExitStack() as held,
    ):
        still_serves(lent)  # so that the host is known, and may have every place
        until_gone(lent)
        silent = [held.enter_context(lent.dial()) for _ in range(most)]
        for client in silent:
            assert nbd.receive(client, len(nbd.GREETING)) == nbd.GREETING
        still_serves(lent)
        assert ends(silent.pop(0))
        assert lent.store.stats()["protocol_errors"] == 0
        for client in silent:
            assert ends(client)
        until_gone(lent)
        assert lent.store.stats()["protocol_errors"] == most - 1
        still_serves(lent)


def test_strangers_have_half_of_the_places_before_an_export() -> None:
    most = 8
    with (
        lent_store(slab_bytes=SLAB, slots=2, connections_max=most) as lent,
        contextlib.ExitStack() as held,
    ):
        for _ in range(4 * most):
            client = held.enter_context(lent.dial())
            assert nbd.receive(client, len(nbd.GREETING)) == nbd.GREETING
        assert lent.store.stats()["connections"] == most // 2
        still_serves(lent)


# ---------------------------------------------------------------------------- neighbours


@pytest.fixture
def two_leases() -> Iterator[tuple[LentStore, str, bytes]]:
    """A store with a lease of ours, a neighbour's ticket, and the bytes in its slab."""
    with lent_store(slab_bytes=SLAB, slots=3, slabs_max=4) as lent:
        lent.store.preallocate()
        lent.store.preallocate()
        neighbour = lent.store.lease_create(3)
        ticket = lent.store.ticket(neighbour, 0, uses=MANY)
        assert lent.store.map(neighbour, 0) is not None
        secret = os.urandom(SLAB)
        with opened(lent, ticket=ticket) as owner:
            assert nbd.write(owner, 0, secret) == 0
        yield lent, ticket, secret


def test_no_name_but_a_ticket_opens_an_export(two_leases: tuple[LentStore, str, bytes]) -> None:
    lent, ticket, _ = two_leases
    wrong = [
        "",
        ticket[:-1],
        ticket + "0",
        ticket + "\0",
        ticket.upper() if ticket != ticket.upper() else ticket.lower() + " ",
        ticket[::-1] if ticket != ticket[::-1] else "x" * 32,
        " " + ticket[1:],
        "\0" * 32,
        "0" * 32,
        lent.ticket[:16] + ticket[16:],
        "default",
        "/" + ticket,
        "../" + ticket,
        "x" * 4096,
    ]
    with lent.dial() as client:
        assert nbd.receive(client, len(nbd.GREETING)) == nbd.GREETING
        client.sendall(nbd.FLAGS)
        for name in wrong:
            for number in (nbd.GO, nbd.INFO):
                answer = nbd.negotiate(client, nbd.go(name, number=number))
                assert answer == nbd.ERR_UNKNOWN, repr(name)
    for name in wrong:
        with lent.dial() as client:
            assert nbd.receive(client, len(nbd.GREETING)) == nbd.GREETING
            client.sendall(nbd.FLAGS + nbd.option(nbd.EXPORT_NAME, name.encode()))
            assert nbd.receive(client, 1) == b""
    until_gone(lent)


def test_no_offset_reaches_a_neighbour(two_leases: tuple[LentStore, str, bytes]) -> None:
    lent, ticket, secret = two_leases
    with opened(lent) as client:
        # Its own slots hold zeros; whatever else there is must be an error.
        for offset in [
            *range(0, 8 * SLAB, SLAB // 2),
            *(2**bits - SLAB // 2 for bits in range(17, 65)),
            *(-SLAB * slabs % 2**64 for slabs in range(1, 9)),
        ]:
            answer = nbd.read(client, offset, SLAB // 2)
            if offset < 2 * SLAB:
                assert answer == bytes(SLAB // 2)
            else:
                assert answer in (nbd.EINVAL, nbd.EIO), offset
                assert nbd.write(client, offset, b"!" * 512) in (nbd.EINVAL, nbd.EIO, nbd.ENOSPC)
                for command in (nbd.TRIM, nbd.ZEROES):
                    client.sendall(nbd.request(command, offset, 512, cookie=4))
                    assert nbd.reply(client)[0] in (nbd.EINVAL, nbd.EIO, nbd.ENOSPC)
    with opened(lent, ticket=ticket) as owner:
        assert nbd.read(owner, 0, SLAB) == secret
