# SPDX-License-Identifier: Apache-2.0
"""TLS in a device's process, which is locked in memory and may serve swap space."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from support.donors.donor_world import IDENTITY, SECRET, WAIT_S, Handler, client_config, raw, world
from support.donors.hostile_donor import hostile

from infiniswap.control.client import connect, fetch_status
from infiniswap.errors import InfiniswapError
from infiniswap.units import KIB, HostPort

SUCCESSOR = """
import asyncio, os, sys
from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect, fetch_status
from infiniswap.device.process.take_over import prepare  # as a standby has imported it
from infiniswap.keys import parse
from infiniswap.units import parse_host_port

config = ClientConfig(parse(sys.argv[3].encode()), connect_s=30, request_s=30)
identity = Identity("00000000-0000-0000-0000-00000000000a", "swap0", "consumer")
address = parse_host_port(sys.argv[2])
os.chroot(sys.argv[1])
os.chdir("/")


async def main():
    peer = address.host
    async with await connect(address, identity, config, QuietHandler(), peer=peer) as session:
        await session.memory()
    assert not os.listdir("/")


asyncio.run(main())
"""


@pytest.mark.requires_root
@pytest.mark.requires_native
async def test_a_successor_opens_its_sessions_without_reading_a_file(tmp_path: Path) -> None:
    """All that it needs was loaded before: its root directory is empty by then."""
    empty = tmp_path / "empty"
    empty.mkdir()
    async with world() as w, asyncio.timeout(WAIT_S):
        successor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SUCCESSOR, str(empty), str(w.address), SECRET),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await successor.communicate()
        assert (successor.returncode, said.decode()) == (0, "")
        assert w.donor.server.counters["sessions_opened"] == 1


MANY_SESSIONS = """
import asyncio, contextlib, re, sys
from support.donors.donor_world import world

count = int(sys.argv[1])


def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read())[1]) * 1024


async def main():
    async with world() as w, contextlib.AsyncExitStack() as held:
        for _ in range(4):  # what is made once
            await held.enter_async_context(await w.session())
        before = resident()
        for _ in range(count):
            await held.enter_async_context(await w.session())
        print((resident() - before) // count)


asyncio.run(main())
"""


async def test_a_session_takes_little_memory() -> None:
    """Of both ends, as both are in that process: what OpenSSL has is part of it. With asyncio's
    buffers alone it would be more than half a MiB."""
    async with asyncio.timeout(WAIT_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MANY_SESSIONS, "64"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        said, _ = await process.communicate()
    assert process.returncode == 0
    assert 0 < int(said) < 256 * KIB


async def test_what_a_peer_does_not_read_is_kept_to_a_bound() -> None:
    """At both ends: a Python that does not look at our bounds any more would show here."""
    async with world() as w, raw(w) as ws:
        server = w.donor.server._port._runner.server  # type: ignore[union-attr]
        assert server is not None
        (handler,) = server.connections
        transports = [handler.transport, ws._response.connection.transport]  # type: ignore[union-attr]
        for transport in transports:
            assert transport is not None
            assert transport.get_write_buffer_limits() == (8 * KIB, 32 * KIB)
            assert transport.get_read_buffer_limits() == (8 * KIB, 32 * KIB)  # type: ignore[attr-defined]


def sockets_to(address: HostPort) -> int:
    """Of this process, connected to there."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as sock:
                    found += sock.getpeername()[:2] == (address.host, address.port)
    return found


async def deaf(ws: web.WebSocketResponse) -> None:
    """Takes no word any more, and answers none."""
    transport = ws._req.transport  # type: ignore[union-attr]
    assert transport is not None
    transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.Event().wait()


async def a_session(address: HostPort) -> None:
    config = client_config(connect_s=WAIT_S, send_s=0.2)
    async with await connect(address, IDENTITY, config, Handler()) as session:
        await session.wait_ended()


async def a_handshake(address: HostPort) -> None:
    with pytest.raises(InfiniswapError):
        await connect(address, IDENTITY, client_config(connect_s=0.2), Handler())


async def a_status(address: HostPort) -> None:
    with pytest.raises(InfiniswapError):
        await fetch_status(address, client_config(connect_s=0.2))


@pytest.mark.parametrize("ask", [a_session, a_handshake, a_status])
async def test_nothing_is_left_of_a_connection_to_a_donor_that_falls_silent(
    ask: Callable[[HostPort], Awaitable[None]],
) -> None:
    """asyncio would keep it for half a minute, and a device has many donors."""
    async with hostile() as donor, asyncio.timeout(WAIT_S):
        donor.welcome = {"heartbeat_ms": 50, "silence_ms": 100}
        donor.converse = deaf
        donor.is_silent = ask is not a_session
        await ask(donor.address)
        for _ in range(8):  # asyncio closes in one of its next rounds
            await asyncio.sleep(0)
        assert sockets_to(donor.address) == 0
