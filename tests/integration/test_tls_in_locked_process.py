# SPDX-License-Identifier: Apache-2.0
"""TLS in a device's process, which is locked in memory and may serve swap space."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from support.donors.donor_world import IDENTITY, SECRET, WAIT_S, Handler, client_config, raw, world
from support.donors.hostile_donor import fall_silent, hostile

from infiniswap.control import tls
from infiniswap.control.client import connect, fetch_status
from infiniswap.control.own_certificate import DEVICE, keep_certificate
from infiniswap.errors import InfiniswapError
from infiniswap.secret import new_secret
from infiniswap.units import KIB, HostPort

SUCCESSOR = """
import asyncio, dataclasses, os, sys
from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect
from infiniswap.device.process.take_over import prepare  # as a standby has imported it
from infiniswap.errors import InfiniswapError
from infiniswap.keys import parse
from infiniswap.units import parse_host_port

empty, other_key, key, *addresses = sys.argv[1:]
config = ClientConfig(parse(key.encode()), connect_s=60, request_s=60)
other = dataclasses.replace(config, keys=parse(other_key.encode()))
identity = Identity("00000000-0000-0000-0000-00000000000a", "swap0", "consumer")
addresses = [parse_host_port(address) for address in addresses]
looked_for = []


def audit(event, args):
    if event in ("open", "import", "os.listdir", "os.scandir") or event.startswith("socket.get"):
        looked_for.append((event, repr(args[0])))


async def attempt(address, config, said):
    try:
        handler, peer = QuietHandler(), address.host
        async with await connect(address, identity, config, handler, peer=peer) as session:
            await session.memory()
            said.append("served")
    except InfiniswapError as error:
        said.append(error.what)


async def main():
    *bad, silent, good = addresses
    said = []
    for address in bad:
        await attempt(address, config, said)
    await attempt(silent, dataclasses.replace(config, connect_s=0.3), said)
    await attempt(good, other, said)
    await attempt(good, config, said)
    return said


os.chroot(empty)
os.chdir("/")
runner = asyncio.Runner()
runner.get_loop()
sys.addaudithook(audit)
said = runner.run(main())
found = list(looked_for)
print(*said, sep="\\n")
assert not found, found
"""


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """A host at this address that says this to whatever it hears first; None: it closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            await reader.read(65_536)
            writer.write(answer)
            if not answer:
                await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"


@pytest.mark.requires_root
@pytest.mark.requires_native
async def test_a_successor_looks_for_no_file_module_or_name(tmp_path: Path) -> None:
    """Whatever its donors do: all that it needs was loaded before. Its root directory is empty by
    then, and a look for a file in vain counts as well."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = f"127.0.0.1:{listener.getsockname()[1]}"
    async with (
        world() as w,
        answering(None) as closing,
        answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as plain,
        answering(tls.FULL) as full,
        answering(b"") as silent,
        asyncio.timeout(WAIT_S),
    ):
        addresses = (refusing, closing, plain, full, silent, str(w.address))
        successor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SUCCESSOR, str(empty), new_secret(), SECRET, *addresses),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complained = await successor.communicate()
        assert (successor.returncode, complained.decode()) == (0, "")
        expected = (
            *("connection refused", "closed", "does not speak TLS", "connection limit"),
            *("no answer within", "secrets differ", "served"),
        )
        told = said.decode().splitlines()
        assert len(told) == len(expected)
        for sentence, words in zip(told, expected, strict=True):
            assert words in sentence
        assert w.donor.server.counters["sessions_opened"] == 1


METRICS_PORT = """
import asyncio, dataclasses, http.client, os, re, socket, ssl, sys
from pathlib import Path

import infiniswap.device.process.take_over  # as a standby has imported it
from infiniswap.config import Config
from infiniswap.control.tls import client_context
from infiniswap.device.process.metrics_port import metrics_port
from infiniswap.device.process.service import DeviceService
from infiniswap.units import HostPort
from support.devices.specs import device_spec

directory, empty, connections = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = Config()
device = dataclasses.replace(
    config.device, backup_dir=directory, metrics_listen=HostPort("127.0.0.1", 0)
)
cluster = dataclasses.replace(config.cluster, metrics_token_file=directory / "token")
service = DeviceService(device_spec(dataclasses.replace(config, device=device, cluster=cluster)))
service.load()
assert "cryptography" not in sys.modules  # the command that starts a device makes the certificate
looked_for = []
context = client_context()


def audit(event, args):
    if event in ("open", "import", "os.listdir", "os.scandir") or event.startswith("socket.get"):
        looked_for.append((event, repr(args[0])))


def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read())[1]) * 1024


def connect(port, source):
    raw = socket.socket()
    raw.settimeout(60)
    raw.bind((source, 0))
    raw.connect(("127.0.0.1", port))
    return context.wrap_socket(raw, server_hostname="infiniswap-device")


def is_open(secured):
    secured.setblocking(False)
    try:
        return bool(secured.recv(1))
    except ssl.SSLWantReadError:
        return True
    except (ssl.SSLError, ConnectionError):
        return False


def ask(port, token):
    connection = http.client.HTTPConnection("infiniswap-device")
    connection.sock = connect(port, "127.0.0.1")
    connection.request("GET", "/metrics", headers={"Authorization": "Bearer " + token})
    answer = connection.getresponse()
    connection.close()
    return answer.status


async def asked():
    async with metrics_port(service) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        # 503: it does not serve yet. Who has no token is not told that.
        return [await asyncio.to_thread(ask, port, t) for t in ("0123456789abcdef", "wrong")]


async def held():
    async with metrics_port(service) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        before, opened, refused = resident(), [], 0
        for number in range(connections):
            source = f"127.0.1.{number // 8 + 1}"
            try:
                opened.append(await asyncio.to_thread(connect, port, source))
            except (ssl.SSLError, ConnectionError):
                refused += 1
        print(sum(map(is_open, opened)), refused, resident() - before)
        for secured in opened:
            secured.close()


runner = asyncio.Runner()
runner.get_loop()
if connections:
    runner.run(held())
else:
    assert "prometheus_client" in sys.modules
    os.chroot(empty)
    os.chdir("/")
    sys.addaudithook(audit)
    said = runner.run(asked())
    found = list(looked_for)
    assert not found, found
    print(*said)
"""


async def _with_metrics_port(tmp_path: Path, connections: int) -> str:
    """What a process says that serves the port as a device's does."""
    empty, state = tmp_path / "empty", tmp_path / "state"
    empty.mkdir()
    keep_certificate(state, DEVICE)
    token = state / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    async with asyncio.timeout(WAIT_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", METRICS_PORT, str(state), str(empty), str(connections)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        said, complained = await process.communicate()
    assert process.returncode == 0, complained.decode()
    return said.decode()


@pytest.mark.requires_root
async def test_a_successors_metrics_port_looks_for_no_file_module_or_name(tmp_path: Path) -> None:
    """Certificate, token and the modules that make the page were loaded before its turn."""
    assert await _with_metrics_port(tmp_path, 0) == "503 401\n"


async def test_connections_to_a_metrics_port_take_a_bounded_memory(tmp_path: Path) -> None:
    """Of both ends, as both are in that process. The port keeps 8 of one peer, which all of this
    host is; who waits longest without a proof gives way."""
    still_open, refused, grown = map(int, (await _with_metrics_port(tmp_path, 40)).split())
    assert 0 < still_open <= 8
    assert refused == 0
    assert grown < 32 * 256 * KIB


MANY_SESSIONS = """
import asyncio, contextlib, re, sys
from infiniswap.control.rate import Rate
from support.donors.donor_world import world

count = int(sys.argv[1])


def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read())[1]) * 1024


async def main():
    async with world(tls_per_host=Rate(1000, 1000.0)) as w, contextlib.AsyncExitStack() as held:
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
        (handler,) = cast(Any, w.donor.server._port._runner).server.connections
        for transport in (handler.transport, cast(Any, ws)._response.connection.transport):
            assert transport.get_write_buffer_limits() == (8 * KIB, 32 * KIB)
            assert transport.get_read_buffer_limits() == (8 * KIB, 32 * KIB)


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
    await fall_silent(cast(Any, ws)._req.transport)


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
