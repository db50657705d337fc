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
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from support.donors.donor_world import (
    Handler,
    World,
    client_config,
    hear,
    hello,
    raw,
    refusal,
    say,
    until,
    welcomed,
    world,
)
from support.donors.hostile_donor import hostile

from infiniswap.control import messages as m
from infiniswap.control.client import Identity, connect, fetch_status
from infiniswap.errors import RequestRefusedError, SessionLostError

OTHER = Identity("00000000-0000-0000-0000-0000000000ff", "swap1", "neighbour")


async def told(w: World, caplog: pytest.LogCaptureFixture, text: str, **counters: int) -> None:
    """It is in the log, and in the counters that `status` shows."""

    def counted() -> bool:
        found = w.donor.service.status().counters
        return all(found.get(name, 0) == count for name, count in counters.items())

    await until(counted)
    assert text in caplog.text, caplog.text
    assert "Traceback" not in caplog.text


@contextlib.asynccontextmanager
async def neighbour(w: World) -> AsyncIterator[tuple[m.LeaseAnswer, m.MapAnswer]]:
    """Another consumer with a slab, which nothing may have happened to in the end."""
    async with await w.session(identity=OTHER) as session:
        lease = await session.lease(1)
        slot = await session.map(lease.lease, 0)
        (ticket,) = await session.tickets(lease.lease, 0, 1)
        yield lease, slot
        again = await session.map(lease.lease, 0)
        assert (again.slot, again.generation) == (slot.slot, slot.generation)
        assert w.store.tickets(lease.lease) == {0: ticket}


@pytest.mark.parametrize("version", [0, max(m.VERSIONS) + 5])
async def test_an_unknown_version(version: int, caplog: pytest.LogCaptureFixture) -> None:
    async with world() as w, neighbour(w):
        async with raw(w) as ws:
            answer = await say(ws, hello(versions=[version]))
            assert (type(answer), answer.reason) == (m.Goodbye, m.GOODBYE_VERSION)
            assert "2" in answer.detail
        await told(w, caplog, f"speaks protocol 2, not {version}", sessions_refused=1)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("nonsense", "not a message"),
        ("[]", "not a message"),
        ('{"type":"hello","versions":[1]}', "not a message"),
        ('{"type":"unmap","id":1,"lease":-1,"slot":0,"generation":1}', "lease"),
        ('{"type":"lease","id":1,"slots_max":99999999}', "slots_max"),
        ("x" * (m.MESSAGE_BYTES_MAX + 1), ""),
    ],
    ids=["nonsense", "list", "hello", "negative", "bounds", "oversize"],
)
async def test_messages_that_are_malformed_or_too_long(
    frame: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w, neighbour(w):
        async with welcomed(w) as ws:
            with contextlib.suppress(ConnectionError):  # closed before all of it was said
                await ws.send_str(frame)
            await until(lambda: len(w.donor.server.sessions) == 1)
        await told(w, caplog, "device raw of raw", protocol_errors=1, sessions_ended_protocol=1)
        (line,) = [line for line in caplog.messages if "device raw" in line and "discon" in line]
        assert reason in line


async def test_leases_of_others_or_of_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        world(daemon__lease_grace_s=30) as w,
        await w.session() as session,
        neighbour(w) as (lease, slot),
    ):
        own = await session.lease(1)
        for number in (lease.lease, 4711, 0, 2**53 - 1):
            for request in (
                session.map(number, 0),
                session.unmap(number, slot.slot, slot.generation),
                session.renew(number, "0" * 32, lease.epoch),
                session.renew(number, own.reclaim, lease.epoch),
                session.renew(number, lease.reclaim, lease.epoch),  # of another device
                session.release(number),
            ):
                assert await refusal(request) == m.REFUSED_UNKNOWN_LEASE
        (address,) = [one.address for one in w.donor.server.sessions if one.device_name == "swap0"]
        text = f"refused a MapRequest of device swap0 of consumer ({address})"
        await told(w, caplog, text, requests_refused_unknown_lease=24)


async def test_a_replayed_done(caplog: pytest.LogCaptureFixture) -> None:
    """DONE of one's own accord, once the slot is another generation's."""
    async with world() as w, await w.session() as session, neighbour(w):
        lease = await session.lease(1)
        first = await session.map(lease.lease, 0)
        await session.unmap(lease.lease, first.slot, first.generation)
        second = await session.map(lease.lease, 1)
        replay = session.unmap(lease.lease, first.slot, first.generation)
        assert await refusal(replay) == m.REFUSED_STALE
        await told(w, caplog, "does not hold generation", requests_refused_stale=1)
        again = await session.map(lease.lease, 1)
        assert (again.slot, again.generation) == (second.slot, second.generation)


async def test_a_replayed_done_of_an_eviction(caplog: pytest.LogCaptureFixture) -> None:
    """The answer to an eviction that has ended takes no other slab."""
    async with world(cluster__heartbeats_missed_max=100) as w, neighbour(w), welcomed(w) as ws:
        lease = await say(ws, m.LeaseRequest(id=1, slots_max=2))
        slot = await say(ws, m.MapRequest(id=2, lease=lease.lease, slab=0))
        eviction = asyncio.create_task(w.donor.service.lent.evict(lease.lease, slot.slot, 60_000))
        evict = await hear(ws)
        assert (evict.slot, evict.generation) == (slot.slot, slot.generation)
        await ws.send_str(m.encode(m.EvictAnswer(id=evict.id)).decode())
        assert await eviction
        kept = await say(ws, m.MapRequest(id=3, lease=lease.lease, slab=1))
        for _ in range(3):
            await ws.send_str(m.encode(m.EvictAnswer(id=evict.id)).decode())
        await told(w, caplog, "an unexpected EvictAnswer", answers_unawaited=3)
        again = await say(ws, m.MapRequest(id=4, lease=lease.lease, slab=1))
        assert (again.slot, again.generation) == (kept.slot, kept.generation)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_replayed_map_that_was_refused(drains: bool) -> None:
    """Nobody still waits for its answer: it must not take a slab, whyever it was refused."""
    async with world(daemon__pool="1M") as w, await w.session(identity=OTHER) as other:
        taken = await other.lease(1)
        slot = await other.map(taken.lease, 0)
        async with welcomed(w) as ws:
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


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0], ids=["ahead", "back"])
async def test_a_clock_that_jumps(jump_s: float, caplog: pytest.LogCaptureFixture) -> None:
    offset_s = 0.0
    async with (
        world(clock=lambda: time.monotonic() + offset_s, daemon__preallocate_slabs=2) as w,
        neighbour(w),
    ):
        offset_s = jump_s
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
        assert (await fetch_status(w.address, client_config())).uptime_s >= 0


# ------------------------------------------------------------------ donors to consumers


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

    async def lie(ws: web.WebSocketResponse) -> None:
        async for frame in ws:
            asked = json.loads(frame.data)
            if asked["type"] == "memory":
                await ws.send_json({"type": "memory_answer", "id": asked["id"], **answer})

    handler = Handler()
    async with hostile() as donor:
        donor.converse = lie
        session = await connect(donor.address, OTHER, client_config(), handler)
        with pytest.raises(SessionLostError, match="protocol"):
            await session.memory()
        ended = await session.wait_ended()
        assert (ended.reason, ended.by_peer) == (m.GOODBYE_PROTOCOL, False)
        await session.close()
    assert [one.reason for one in handler.ends] == [m.GOODBYE_PROTOCOL]
    assert f"donor {donor.address}: " in caplog.text
