# SPDX-License-Identifier: Apache-2.0
"""Peers that say more than an honest one ever would: donors to consumers, consumers to donors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from support.donors.donor_world import (
    IDENTITY,
    WAIT_S,
    Handler,
    client_config,
    hello,
    raw,
    say,
    until,
    welcomed,
    world,
)
from support.donors.hostile_donor import Conversation, hostile

from infiniswap.control import messages as m
from infiniswap.control.channel import Ended, Limits, bytes_received
from infiniswap.control.client import connect
from infiniswap.errors import InfiniswapError

Say = Callable[[Any], Awaitable[None]]
"""One frame of a flood, over either of aiohttp's WebSocket classes."""


def text(message: Any) -> Say:
    return lambda ws: ws.send_str(m.encode(message).decode())


EITHER: dict[str, Say] = {
    "pings": text(m.Ping(id=1)),
    "pongs": text(m.Pong(id=1)),
    "websocket pings": lambda ws: ws.ping(b"x"),
    "websocket pongs": lambda ws: ws.pong(b"x"),
    "answers to nothing": text(m.RefusedAnswer(id=1 << 40, reason="busy")),
}
OF_DONORS = EITHER | {
    "notices": text(m.DrainNotice(draining=True)),
    "evictions": text(m.EvictRequest(id=1, lease=1, slot=1, generation=1, deadline_ms=1)),
    "activity": text(m.ActivityRequest(id=1, lease=1)),
}
OF_CONSUMERS = EITHER | {
    "memory": text(m.MemoryRequest(id=1)),
    "renewals": text(m.RenewRequest(id=1, lease=1, reclaim="0" * 32, epoch=1)),
}


async def flood(ws: Any, one: Say, until_done: Callable[[], bool]) -> int:
    """Says it until that is true or the other end has had enough; how often."""
    said = 0
    with contextlib.suppress(ConnectionError, RuntimeError, aiohttp.ClientError):
        while not until_done():
            for _ in range(64):
                await one(ws)
                said += 1
            await asyncio.sleep(0)  # both ends are on this loop
    return said


async def ended_session(converse: Conversation, handler: Handler) -> Ended:
    """How it ends with a donor that does so in it."""
    async with hostile() as donor, asyncio.timeout(WAIT_S):
        donor.converse = converse
        donor.welcome = {"heartbeat_ms": 1000, "silence_ms": 100_000}
        config = client_config(connect_s=WAIT_S)
        async with await connect(donor.address, IDENTITY, config, handler) as session:
            return await session.wait_ended()


@pytest.mark.parametrize("kind", OF_DONORS)
async def test_the_session_of_a_donor_that_floods_is_ended(kind: str) -> None:
    handler = Handler()
    ended = await ended_session(
        lambda ws: flood(ws, OF_DONORS[kind], lambda: bool(handler.ends)), handler
    )
    assert (ended.reason, ended.by_peer) == (m.GOODBYE_FLOOD, False)
    assert "more than" in ended.detail
    assert handler.ends == [ended]


@pytest.mark.parametrize("kind", OF_CONSUMERS)
async def test_the_session_of_a_consumer_that_floods_is_ended(kind: str) -> None:
    async with world(cluster__heartbeat_s=1.0) as w, welcomed(w) as ws:
        counters = w.donor.server.counters

        async def hear_all() -> list[Any]:
            heard = []
            async for frame in ws:
                heard.append(m.decode_to_consumer(frame.data))
            return heard

        hearing = asyncio.create_task(hear_all())
        await flood(ws, OF_CONSUMERS[kind], lambda: bool(counters["sessions_ended_flood"]))
        await until(lambda: not w.donor.server.sessions)
        assert counters["sessions_ended_flood"] == 1
        with contextlib.suppress(aiohttp.ClientError):
            heard = await hearing
        # It hears why, unless it was still talking when the connection ended.
        goodbyes = [each.reason for each in heard if isinstance(each, m.Goodbye)]
        assert set(goodbyes) <= {m.GOODBYE_FLOOD}


async def test_a_host_that_has_flooded_is_not_let_in_again_at_once() -> None:
    async with world() as w, asyncio.timeout(WAIT_S):
        server = w.donor.server
        neighbour = await w.session()
        async with welcomed(w) as ws:
            await flood(ws, EITHER["pings"], lambda: bool(server.counters["sessions_ended_flood"]))
        with pytest.raises(InfiniswapError, match="has flooded"):
            await w.session()
        # Whoever is there stays, and other hosts come.
        await neighbour.memory()
        await neighbour.close()
        async with await w.session(host="10.0.0.2") as other:
            await other.memory()


FRAGMENTS = b"\x00\x00" * 500_000
"""Of a message that never ends: nothing of it is a message, and each has to be looked at."""


async def test_a_donor_that_never_ends_a_message_has_its_session_ended() -> None:
    handler = Handler()

    async def fragments(ws: Any) -> None:
        transport = ws._req.transport
        transport.write(b"\x01\x01x")
        while not handler.ends and not transport.is_closing():
            if not transport.get_write_buffer_size():
                transport.write(FRAGMENTS)
            await asyncio.sleep(0)

    ended = await ended_session(fragments, handler)
    assert (ended.reason, ended.by_peer) == (m.GOODBYE_FLOOD, False)
    assert "MiB a second" in ended.detail


async def test_the_bytes_of_a_session_are_counted_by_the_kernel() -> None:
    async with world() as w, raw(w) as ws, asyncio.timeout(WAIT_S):
        before = bytes_received(ws)
        assert before > 0
        await say(ws, hello())
        after = bytes_received(ws)
        assert after - before >= len(m.encode(m.Challenge(version=2, versions=[2], nonce="0" * 64)))


@pytest.mark.parametrize("kind", ["websocket pings", "websocket pongs"])
async def test_nobody_pings_before_the_session_is_open(kind: str) -> None:
    async with world() as w, raw(w) as ws, asyncio.timeout(WAIT_S):
        await EITHER[kind](ws)
        goodbye = m.decode_to_consumer(await ws.receive_str())
        assert isinstance(goodbye, m.Goodbye)
        assert goodbye.reason == m.GOODBYE_PROTOCOL


async def test_as_many_requests_as_an_honest_consumer_sends_are_borne() -> None:
    """One for every slab of the largest lease that comes at once, and heartbeats of a pause."""
    limits = Limits()
    async with world() as w, welcomed(w) as ws:
        for number in range(limits.beats_burst // 2):
            await ws.send_str(m.encode(m.Ping(id=number)).decode())
        for number in range(limits.requests.burst // 2):
            await ws.send_str(m.encode(m.MemoryRequest(id=number)).decode())
        answers = 0
        while answers < limits.requests.burst // 2:
            message = m.decode_to_consumer(await ws.receive_str())
            assert not isinstance(message, m.Goodbye)
            answers += isinstance(message, m.MemoryAnswer | m.RefusedAnswer)
