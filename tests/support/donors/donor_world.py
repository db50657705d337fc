# SPDX-License-Identifier: Apache-2.0
"""A donor in this process, over a fake store, for tests of the control API."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest

from infiniswap.config import Config, load
from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.channel import Ended
from infiniswap.control.client import ClientConfig, Identity, Session, connect
from infiniswap.control.handshake_rate import PER_HOST
from infiniswap.control.rate import Rate
from infiniswap.control.tls import client_context, peer_digest
from infiniswap.donor.serve import Donor, serve
from infiniswap.engine.store import StoreConfig
from infiniswap.errors import RequestRefusedError
from infiniswap.keys import parse
from infiniswap.secret import write_secret
from infiniswap.testing.memory import FakeMemory
from infiniswap.testing.store import FakeStore
from infiniswap.units import GIB, HostPort
from support.donors.near_link import http_from

WAIT_S = 60.0
SECRET = "5b1d0e7f9a3c4826b7f0d19e8c6a25437e40f1b2d3958c6a17f4e0bd82936c5a"
"""As the file of the test cluster holds it (the fixture secret_file)."""
KEYS = parse(SECRET.encode())
IDENTITY = Identity("00000000-0000-0000-0000-00000000000a", "swap0", "consumer")
SETTINGS: dict[str, object] = {
    "daemon__listen": "127.0.0.1:0",
    "daemon__data_port": 0,
    "daemon__slab": "1M",
    "daemon__pool": "8M",
    "daemon__headroom": "1M",
    "daemon__lease_grace_s": 0.3,
    "cluster__heartbeat_s": 0.05,
    "cluster__heartbeats_missed_max": 20,
    "policy__period_s": 0.05,
}


def client_config(**changes: Any) -> ClientConfig:
    """Of a consumer that knows the secret of the test cluster."""
    return ClientConfig(**{"keys": KEYS, **changes})


def _configured(path: Path, keys: Mapping[str, object]) -> Config:
    """The file but for those keys; `daemon__slab` stands for daemon.slab."""
    return load(path, {key.replace("__", "."): value for key, value in keys.items()}, {})


class World:
    """A donor under test."""

    def __init__(self, donor: Donor, store: FakeStore, memory: FakeMemory) -> None:
        self.donor = donor
        self.store = store
        self.memory = memory
        self.address = HostPort("127.0.0.1", donor.ports.control_port)

    async def session(
        self,
        handler: Handler | None = None,
        identity: Identity = IDENTITY,
        host: str = "",
        **changes: Any,
    ) -> Session:
        """host: the address that the donor sees, where that is not to be loopback."""
        if host:
            changes["http"] = http_from(self.donor.server, host)
        config = client_config(**{"request_s": WAIT_S, "connect_s": WAIT_S, **changes})
        return await connect(self.address, identity, config, handler or Handler())


class Handler:
    """Records what the donor asks."""

    def __init__(self) -> None:
        self.evicted: list[tuple[int, int, int]] = []
        self.move_s: list[float] = []
        self.drains: list[bool] = []
        self.ends: list[Ended] = []
        self.answer_evict = asyncio.Event()
        self.answer_evict.set()
        self.rates: Mapping[int, float] = {0: 12.5}
        self.has_backup = True
        self.last_copies = 0
        self.device: m.DeviceFigures | None = None

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        self.move_s.append(move_s)
        self.last_copies += last_copy
        if not self.has_backup:
            raise RequestRefusedError("the only copy", reason=m.REFUSED_ONLY_COPY)
        await self.answer_evict.wait()
        self.evicted.append((lease, slot, generation))

    async def activity(self, lease: int) -> Mapping[int, float]:
        return self.rates

    def figures(self) -> m.DeviceFigures | None:
        return self.device

    def draining(self, draining: bool) -> None:
        self.drains.append(draining)

    def ended(self, ended: Ended) -> None:
        self.ends.append(ended)


@contextlib.asynccontextmanager
async def world(
    *,
    handshake_s: float = WAIT_S,
    tls_per_host: Rate = PER_HOST,
    clock: Callable[[], float] = time.monotonic,
    path: Path = Path("/dev/null"),
    **overrides: object,
) -> AsyncIterator[World]:
    memory = FakeMemory(GIB)
    made: list[FakeStore] = []

    def factory(config: StoreConfig) -> FakeStore:
        store = FakeStore(config)
        memory.store = store
        made.append(store)
        return store

    with tempfile.TemporaryDirectory() as state_dir:
        secret_file = Path(state_dir) / "secret"
        write_secret(secret_file, SECRET)
        own: dict[str, object] = {
            "daemon__state_dir": state_dir,
            "cluster__secret_file": secret_file,
        }
        config = _configured(path, {**own, **SETTINGS, **overrides})
        made_so = serve(
            config,
            factory,
            memory,
            stop_s=2.0,
            request_s=handshake_s,
            proof_s=handshake_s,
            tls_per_host=tls_per_host,
            clock=clock,
        )
        async with _at_any_priority(), made_so as donor:
            yield World(donor, made[0], memory)
    assert made[0].closed


@contextlib.asynccontextmanager
async def _at_any_priority() -> AsyncIterator[None]:
    """A pytest beside another one has a low priority, of which a daemon in it would complain."""
    with mock.patch("infiniswap.donor.serve.of_process", return_value=()):
        yield


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the fakes tell nobody
            await asyncio.sleep(0.01)


async def refusal(request: Awaitable[object]) -> str:
    with pytest.raises(RequestRefusedError) as caught:
        await request
    return caught.value.reason


@contextlib.asynccontextmanager
async def raw(w: World, host: str = "") -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """From that address of the loopback."""
    connector = aiohttp.TCPConnector(
        local_addr=(host, 0) if host else None, ssl=client_context(), force_close=True
    )
    async with (
        asyncio.timeout(WAIT_S),
        aiohttp.ClientSession(connector=connector) as http,
        http.ws_connect(f"https://{w.address}{m.SESSION_PATH}", protocols=(m.SUBPROTOCOL,)) as ws,
    ):
        yield ws


@contextlib.asynccontextmanager
async def welcomed(w: World) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A session whose messages the test writes."""
    async with raw(w) as ws:
        first = hello()
        challenge = await say(ws, first)
        assert isinstance(await say(ws, auth_for(ws, first, challenge)), m.Welcome)
        yield ws


def auth_for(connection: Any, first: m.Hello, challenge: m.Challenge) -> m.Auth:
    """The right proof on this connection."""
    transcript = transcript_of(peer_digest(connection), first, challenge)
    return m.Auth(proof=auth.consumer_proof(KEYS.session, transcript))


def transcript_of(digest: bytes, first: m.Hello, challenge: m.Challenge) -> auth.Transcript:
    """What the proofs cover where the server has a certificate of that digest."""
    return auth.Transcript(
        digest=digest,
        version=challenge.version,
        versions_consumer=tuple(first.versions),
        versions_donor=tuple(challenge.versions),
        device_id=first.device_id,
        nonce_consumer=first.nonce,
        nonce_donor=challenge.nonce,
    )


def hello(**changes: Any) -> m.Hello:
    fields = {
        "versions": [2],
        "device_id": IDENTITY.device_id,
        "device_name": "raw",
        "host_name": "raw",
        "nonce": secrets.token_hex(32),
    }
    return m.Hello(**{**fields, **changes})


async def hear(ws: aiohttp.ClientWebSocketResponse) -> Any:
    """The next message but for heartbeats, which come whenever one is due."""
    while isinstance(message := m.decode_to_consumer(await ws.receive_str()), m.Ping):
        pass
    return message


async def say(ws: aiohttp.ClientWebSocketResponse, message: Any) -> Any:
    """Says it and returns the answer."""
    await ws.send_str(m.encode(message).decode())
    return await hear(ws)
