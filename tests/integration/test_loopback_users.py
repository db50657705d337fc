# SPDX-License-Identifier: Apache-2.0
"""Users of one host at its own port: what one does is not counted against another."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.donors.donor_world import WAIT_S, World, client_config, world

from infiniswap.control.client import fetch_status
from infiniswap.control.handshake_rate import PER_HOST
from infiniswap.control.peer import THIS_HOST
from infiniswap.control.rate import Rate
from infiniswap.control.socket_owner import local_user, peer_of_socket

NOBODY = 65_534

_AS_NOBODY = f"""
import encodings.idna, socket, ssl, sys  # before this user may no longer read them
import os
os.setuid({NOBODY})
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
def dialled():
    sock = socket.socket(family)
    sock.connect((sys.argv[1], int(sys.argv[2])))
    return sock
"""
_FLOOD = """
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
begun = 0
for _ in range(int(sys.argv[3])):
    try:
        context.wrap_socket(dialled()).close()
        begun += 1
    except OSError:
        pass
print(begun)
"""
_WAIT = """
held = dialled()
sys.stdin.read()
"""


def as_nobody(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _AS_NOBODY + code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def flooded(w: World, count: int) -> int:
    """How many of so many handshakes of another user succeeded."""
    flood = as_nobody(_FLOOD, w.address.host, w.address.port, count)
    return int((await asyncio.to_thread(flood.communicate, timeout=WAIT_S))[0])


@pytest.mark.requires_root
async def test_a_flood_of_one_user_keeps_no_other_user_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    surplus = 8
    async with world(tls_per_host=Rate(PER_HOST.burst, 0.0)) as w:
        assert await flooded(w, PER_HOST.burst + surplus) == PER_HOST.burst
        for _ in range(12):
            assert (await fetch_status(w.address, client_config())).donor_id
        assert w.donor.server.counters["handshakes_limited"] == surplus
        assert f"refused a connection from 127.0.0.1 ({local_user(NOBODY)})" in caplog.text


async def test_what_begins_no_handshake_costs_its_host_none() -> None:
    async with world(tls_per_host=Rate(1, 0.0)) as w:
        for begin in (b"", b"\x16", b"\x16\x03\x01\x00\xff", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((w.address.host, w.address.port)) as sock:
                sock.sendall(begin)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(WAIT_S)
                await asyncio.to_thread(sock.recv, 4096)
        assert (await fetch_status(w.address, client_config())).donor_id


@pytest.mark.requires_root
async def test_sessions_over_loopback_count_for_their_user() -> None:
    async with world() as w, await w.session():
        (session,) = w.donor.server.sessions
        assert session.consumer == local_user(os.geteuid())


@pytest.fixture(params=["127.0.0.1", "127.0.0.9", "::ffff:127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    """One that listens, and the address that others dial; the mapped one is dialled as IPv4."""
    host = str(request.param)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = "::" if host.startswith("::ffff:") else host
    try:
        made = socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::")
    except OSError:
        pytest.skip("no IPv6 on this host")
    with made:
        yield made, host.removeprefix("::ffff:")


def test_a_connection_of_this_host_counts_for_its_user(
    listener: tuple[socket.socket, str],
) -> None:
    own, host = listener
    with socket.create_connection((host, own.getsockname()[1])) as mine:
        sock, name = own.accept()
        with sock:
            assert peer_of_socket(sock, name) == local_user(os.geteuid())
            mine.close()  # which makes the kernel say that it is root's
            assert peer_of_socket(sock, name) == THIS_HOST


@pytest.mark.requires_root
def test_a_connection_of_another_user_counts_for_that_one(
    listener: tuple[socket.socket, str],
) -> None:
    own, host = listener
    other = as_nobody(_WAIT, host, own.getsockname()[1])
    sock, name = own.accept()
    with sock:
        assert peer_of_socket(sock, name) == local_user(NOBODY)
    other.communicate("", timeout=WAIT_S)
