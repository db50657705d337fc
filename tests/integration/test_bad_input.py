# SPDX-License-Identifier: Apache-2.0
"""What bad input gets from a donor's control port: refused, counted, and told in the log with the
reason; nobody else notices.

Parsers one by one: test_control_session.py, test_hostile_control.py. Figures of memory:
test_harvest.py. Donors that lie to consumers: test_hostile_donor.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from support.donors.donor_world import Handler, World, hear, hello, raw, refusal, say, until, world

from infiniswap.control import messages as m
from infiniswap.control.client import ClientConfig, Identity, Session, connect, fetch_status
from infiniswap.errors import RequestRefusedError, SessionLostError
from infiniswap.units import MIB, HostPort

OTHER = Identity("00000000-0000-0000-0000-0000000000ff", "swap1", "neighbour")


async def told(w: World, caplog: pytest.LogCaptureFixture, text: str, **counters: int) -> None:
    """It is in the log, and in the counters that `status` shows."""

    def counted() -> bool:
        found = w.donor.service.status().counters
        return all(found.get(name, 0) == count for name, count in counters.items())

    await until(counted)
    assert text in caplog.text, caplog.text
    assert "Traceback" not in caplog.text


class Neighbour:
    """Another consumer with a slab, which nothing may happen to."""

    def __init__(self, w: World, session: Session, lease: m.LeaseAnswer, slot: m.MapAnswer) -> None:
        self.w, self.session, self.lease, self.slot = w, session, lease, slot

    async def is_well(self) -> None:
        again = await self.session.map(self.lease.lease, 0)
        assert (again.slot, again.generation) == (self.slot.slot, self.slot.generation)
        assert self.w.store.token(self.lease.lease) == self.lease.token


async def neighbour(w: World) -> Neighbour:
    session = await w.session(identity=OTHER)
    lease = await session.lease(1)
    return Neighbour(w, session, lease, await session.map(lease.lease, 0))


@contextlib.asynccontextmanager
async def evicting(w: World, lease: int, slot: int) -> AsyncIterator[None]:
    """An eviction that is over when the block is."""
    eviction = asyncio.create_task(w.donor.service.lent.evict(lease, slot, 60_000))
    yield
    assert await eviction


async def opened(ws: aiohttp.ClientWebSocketResponse) -> None:
    """A session, by hand."""
    assert isinstance(await say(ws, hello()), m.Challenge)
    assert isinstance(await say(ws, m.Auth(proof="")), m.Welcome)


async def test_an_unknown_version(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w:
        other = await neighbour(w)
        async with raw(w) as ws:
            answer = await say(ws, hello(versions=[77]))
            assert (type(answer), answer.reason) == (m.Goodbye, m.GOODBYE_VERSION)
        await told(w, caplog, "speaks protocol 1, not 77", sessions_refused=1)
        await other.is_well()
        await other.session.close()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("nonsense", "not a message"),
        ('{"type":"unmap","id":1,"lease":-1,"slot":0,"generation":1}', "lease"),
        ('{"type":"lease","id":1,"slots_max":99999999}', "slots_max"),
        ("x" * (m.MESSAGE_BYTES_MAX + 1), ""),
    ],
    ids=["nonsense", "negative", "bounds", "oversize"],
)
async def test_messages_that_are_malformed_or_too_long(
    frame: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w:
        other = await neighbour(w)
        async with raw(w) as ws:
            await opened(ws)
            with contextlib.suppress(ConnectionError):  # closed before all of it was said
                await ws.send_str(frame)
            await until(lambda: len(w.donor.server.sessions) == 1)
        await told(w, caplog, "device raw of raw", protocol_errors=1, sessions_ended_protocol=1)
        (line,) = [line for line in caplog.messages if "device raw" in line and "discon" in line]
        assert reason in line
        await other.is_well()
        await other.session.close()


async def test_leases_of_others_or_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w, await w.session() as session:
        other = await neighbour(w)
        for number in (other.lease.lease, 4711):
            for request in (
                session.map(number, 0),
                session.unmap(number, other.slot.slot, other.slot.generation),
                session.renew(number, "0" * 32, 1),
                session.release(number),
            ):
                assert await refusal(request) == m.REFUSED_UNKNOWN_LEASE
        text = f"refused a MapRequest of device swap0 of consumer ({session_address(w)})"
        await told(w, caplog, text, requests_refused_unknown_lease=8)
        await other.is_well()
        await other.session.close()


def session_address(w: World) -> str:
    (address,) = [one.address for one in w.donor.server.sessions if one.device_name == "swap0"]
    return address


async def test_a_replayed_done(caplog: pytest.LogCaptureFixture) -> None:
    """DONE of one's own accord, once the slot is another generation's."""
    async with world() as w, await w.session() as session:
        other = await neighbour(w)
        lease = await session.lease(1)
        first = await session.map(lease.lease, 0)
        await session.unmap(lease.lease, first.slot, first.generation)
        second = await session.map(lease.lease, 1)
        replay = session.unmap(lease.lease, first.slot, first.generation)
        assert await refusal(replay) == m.REFUSED_STALE
        await told(w, caplog, "does not hold generation", requests_refused_stale=1)
        again = await session.map(lease.lease, 1)
        assert (again.slot, again.generation) == (second.slot, second.generation)
        await other.is_well()
        await other.session.close()


async def test_a_replayed_done_of_an_eviction(caplog: pytest.LogCaptureFixture) -> None:
    """The answer to an eviction that has ended takes no other slab."""
    async with world(cluster__heartbeats_missed_max=100) as w:
        other = await neighbour(w)
        async with raw(w) as ws:
            await opened(ws)
            lease = await say(ws, m.LeaseRequest(id=1, slots_max=2))
            slot = await say(ws, m.MapRequest(id=2, lease=lease.lease, slab=0))
            async with evicting(w, lease.lease, slot.slot):
                evict = await hear(ws)
                assert (evict.slot, evict.generation) == (slot.slot, slot.generation)
                await ws.send_str(m.encode(m.EvictAnswer(id=evict.id)).decode())
            kept = await say(ws, m.MapRequest(id=3, lease=lease.lease, slab=1))
            for _ in range(3):
                await ws.send_str(m.encode(m.EvictAnswer(id=evict.id)).decode())
            await told(w, caplog, "an unexpected EvictAnswer", answers_unawaited=3)
            again = await say(ws, m.MapRequest(id=4, lease=lease.lease, slab=1))
            assert (again.slot, again.generation) == (kept.slot, kept.generation)
        await other.is_well()
        await other.session.close()


@pytest.mark.parametrize("drains", [False, True])
async def test_a_replayed_map_that_was_refused(drains: bool) -> None:
    """Nobody still waits for its answer: it must not take a slab, whyever it was refused."""
    async with world(daemon__pool="1M") as w:
        other = await w.session(identity=OTHER)
        taken = await other.lease(1)
        slot = await other.map(taken.lease, 0)
        async with raw(w) as ws:
            await opened(ws)
            lease = await say(ws, m.LeaseRequest(id=1, slots_max=2))
            if drains:
                await w.donor.service.set_draining(True)
                assert isinstance(await hear(ws), m.DrainNotice)
            request = m.MapRequest(id=2, lease=lease.lease, slab=0)
            assert isinstance(await say(ws, request), m.RefusedAnswer)
            with contextlib.suppress(RequestRefusedError):  # a drain may have taken it
                await other.unmap(taken.lease, slot.slot, slot.generation)
            if drains:
                await w.donor.service.set_draining(False)
                assert isinstance(await hear(ws), m.DrainNotice)
            for _ in range(2):
                assert isinstance(await say(ws, request), m.RefusedAnswer)
            assert not w.donor.service.lent.mapped()
            mapped = await say(ws, m.MapRequest(id=3, lease=lease.lease, slab=0))
            # One that succeeded is answered as before.
            again = await say(ws, m.MapRequest(id=3, lease=lease.lease, slab=0))
            assert (again.slot, again.generation) == (mapped.slot, mapped.generation)
            assert len(w.donor.service.lent.mapped()) == 1
        await other.close()


class JumpingClock:
    """The real one, until it is moved."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset_s


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0], ids=["ahead", "back"])
async def test_a_clock_that_jumps(jump_s: float, caplog: pytest.LogCaptureFixture) -> None:
    clock = JumpingClock()
    async with world(clock=clock, daemon__preallocate_slabs=2) as w:
        other = await neighbour(w)
        clock.offset_s += jump_s
        word = "ahead" if jump_s > 0 else "back"
        await told(w, caplog, f"the clock went {word} by 864", clock_jumps=1)
        # Who has a session keeps its lease; the figures are still read, and slabs still lent.
        reads = w.memory.reads
        await until(lambda: w.memory.reads > reads + 2)
        async with await w.session() as session:
            lease = await session.lease(4)
            for slab in range(4):
                await session.map(lease.lease, slab)
        # A grace that begins now ends, too.
        await until(lambda: w.store.stats()["leases"] == 1)
        await other.is_well()
        await other.session.close()
        assert (await fetch_status(w.address, ClientConfig())).uptime_s >= 0


# ------------------------------------------------------------------ donors to consumers


@contextlib.asynccontextmanager
async def lying_about_memory(answer: dict[str, object]) -> AsyncIterator[HostPort]:
    """A donor that opens sessions as it should, and then says this of its memory."""

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse(protocols=(m.SUBPROTOCOL,))
        await ws.prepare(request)
        challenge = m.Challenge(version=1, versions=[1], nonce=secrets.token_hex(32), proof="")
        for message in (challenge, WELCOME):
            await ws.receive()
            await ws.send_str(m.encode(message).decode())
        async for frame in ws:
            asked = json.loads(frame.data)
            if asked["type"] == "memory":
                await ws.send_str(
                    json.dumps({"type": "memory_answer", "id": asked["id"], **answer})
                )
        return ws

    server = web.Server(serve)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
    finally:
        listener.close()
        await server.shutdown(1.0)


WELCOME = m.Welcome(
    version=1,
    donor_id="00000000-0000-0000-0000-0000000000dd",
    donor_name="liar",
    incarnation="0" * 32,
    slab_bytes=MIB,
    data_port=9401,
    grace_ms=1000,
    heartbeat_ms=1000,
    silence_ms=60_000,
    draining=False,
)


@pytest.mark.parametrize(
    "answer",
    [
        {"used_share": -0.5, "free_slabs": 1, "can_map": 1},
        {"used_share": 7.0, "free_slabs": 1, "can_map": 1},
        {"used_share": 0.5, "free_slabs": -1, "can_map": 1},
        {"used_share": 0.5, "free_slabs": 1, "can_map": 2**70},
        {"used_share": "much", "free_slabs": 1, "can_map": 1},
    ],
    ids=["negative", "more than all", "negative slabs", "huge", "text"],
)
async def test_a_donor_that_lies_about_its_memory(
    answer: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """The session ends; placement never sees the figure."""
    handler = Handler()
    async with lying_about_memory(answer) as address:
        session = await connect(address, OTHER, ClientConfig(), handler)
        with pytest.raises(SessionLostError, match="protocol"):
            await session.memory()
        ended = await session.wait_ended()
        assert (ended.reason, ended.by_peer) == (m.GOODBYE_PROTOCOL, False)
        await session.close()
    assert [one.reason for one in handler.ends] == [m.GOODBYE_PROTOCOL]
    assert f"donor {address}: " in caplog.text
