# SPDX-License-Identifier: Apache-2.0
"""Sessions between the real client and the real server on loopback; the store is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.donors.donor_world import (
    IDENTITY,
    KEYS,
    WAIT_S,
    Handler,
    World,
    client_config,
    hello,
    raw,
    refusal,
    say,
    transcript_of,
    until,
    world,
)
from support.donors.hostile_donor import hostile, status
from support.donors.rdma_end import END

from infiniswap.control import auth, client
from infiniswap.control import messages as m
from infiniswap.control.channel import LOST
from infiniswap.control.client import (
    Identity,
    connect,
    fetch_status,
    fetch_version,
    set_draining,
)
from infiniswap.control.tls import client_context, peer_digest
from infiniswap.errors import (
    ConfigError,
    InfiniswapError,
    NoDonorError,
    NotPermittedError,
    ProtocolMismatchError,
    SessionLostError,
    SlabSizeMismatchError,
    WrongSecretError,
)
from infiniswap.keys import derive
from infiniswap.secret import read_secret, write_secret
from infiniswap.testing.relay import LossyLink
from infiniswap.units import GIB, MIB, HostPort

ANOTHER = derive(b"quite another secret")


# ------------------------------------------------------------------------ the good way


async def test_a_donor_is_found_again_without_its_name() -> None:
    config = client_config(request_s=WAIT_S, connect_s=WAIT_S)
    async with world() as w:
        named = replace(w.address, host="localhost")
        async with await connect(named, IDENTITY, config, Handler()) as session:
            assert session.peer == "127.0.0.1"
            assert session.data_address == HostPort("127.0.0.1", w.donor.ports.data_port)
        nowhere = replace(w.address, host="donor.invalid")
        with pytest.raises(NoDonorError):
            await connect(nowhere, IDENTITY, config, Handler())
        async with await connect(nowhere, IDENTITY, config, Handler(), peer=session.peer) as again:
            assert again.address == nowhere
            assert again.data_address == session.data_address


async def test_a_session_leases_maps_and_gives_back() -> None:
    async with world() as w, await w.session() as session:
        assert session.welcome.slab_bytes == MIB
        assert session.data_address == HostPort("127.0.0.1", w.donor.ports.data_port)
        memory = await session.memory()
        assert memory.can_map == 8
        assert 0.0 <= memory.used_share <= 1.0
        lease = await session.lease(4)
        assert lease.export_bytes == 4 * MIB
        tickets = await session.tickets(lease.lease, 0, 2)
        assert w.store.tickets(lease.lease) == dict(enumerate(tickets))
        first, second = await session.map(lease.lease, 17), await session.map(lease.lease, 3)
        assert {first.slot, second.slot} == {0, 1}
        await session.unmap(lease.lease, first.slot, first.generation)
        reason = await refusal(session.unmap(lease.lease, first.slot, first.generation))
        assert reason == m.REFUSED_STALE
        await session.release(lease.lease)
        assert await refusal(session.map(lease.lease, 1)) == m.REFUSED_UNKNOWN_LEASE
        await until(lambda: w.store.stats()["slabs_mapped"] == 0)


async def test_rdma_is_asked_for_and_told_over_the_session() -> None:
    async with world() as w, await w.session() as session:
        assert session.welcome.rdma
        lease = await session.lease(4)
        assert (await session.map(lease.lease, 1)).key is None
        assert await refusal(session.rdma(lease.lease, [END])) == m.REFUSED_NO_RDMA
        w.store.has_rdma = True
        answer = await session.rdma(lease.lease, [END, END])
        assert len(answer.ends) == 2
        assert len(answer.slots) == 1
        assert (await session.map(lease.lease, 2)).key is not None
        assert (await session.rdma(lease.lease, [])).ends == []
        assert (await session.map(lease.lease, 3)).key is None
        assert await refusal(session.rdma(lease.lease + 1, [END])) == m.REFUSED_UNKNOWN_LEASE
    async with world(daemon__rdma="off") as w, await w.session() as session:
        assert not session.welcome.rdma
        lease = await session.lease(4)
        assert await refusal(session.rdma(lease.lease, [END])) == m.REFUSED_NO_RDMA


async def test_no_more_slots_than_leased() -> None:
    async with world() as w, await w.session() as session:
        lease = await session.lease(1)
        await session.map(lease.lease, 0)
        assert await refusal(session.map(lease.lease, 1)) == m.REFUSED_QUOTA


async def test_no_more_leases_than_allowed() -> None:
    async with world(daemon__leases_max=1) as w, await w.session() as session:
        await session.map((await session.lease(1)).lease, 0)
        assert await refusal(session.lease(1)) == m.REFUSED_QUOTA


async def test_a_release_that_takes_long_disturbs_nobody() -> None:
    async with world() as w, await w.session() as session:
        lease, other = await session.lease(1), await session.lease(1)
        w.store.destroyed.clear()
        release = asyncio.create_task(session.release(lease.lease))
        await until(lambda: w.store.stats()["leases"] == 1)
        # Several rounds of the loop that looks after the leases, one of which is half gone.
        await asyncio.sleep(0.3)
        await session.map(other.lease, 0)
        assert w.donor.service.counters["lease_errors"] == 0
        w.store.destroyed.set()
        await release
        assert len((await fetch_status(w.address, client_config())).leases) == 1


# --------------------------------------------------------------- lost sessions, leases


async def test_a_lease_is_reclaimed_within_its_grace_and_old_tickets_are_dead() -> None:
    async with world(daemon__lease_grace_s=30) as w:
        first = await w.session()
        lease = await first.lease(4)
        slot = await first.map(lease.lease, 9)
        await first.tickets(lease.lease, 0, 2)
        await first.close()
        async with await w.session() as second:
            assert second.welcome.incarnation == first.welcome.incarnation
            renewed = await second.renew(lease.lease, lease.reclaim, lease.epoch)
            assert renewed.epoch == lease.epoch + 1
            assert not w.store.tickets(lease.lease)
            assert renewed.slots == [m.SlotInfo(slot.slot, slot.generation, 9)]
            await second.map(lease.lease, 10)


async def test_tickets_are_for_the_owner_of_the_lease_and_its_numbers() -> None:
    async with world() as w, await w.session() as session:
        lease = (await session.lease(2)).lease
        first = await session.tickets(lease, 30, 2)
        assert await refusal(session.tickets(lease, 31, 2)) == m.REFUSED_QUOTA
        assert await refusal(session.tickets(lease + 1, 0, 1)) == m.REFUSED_UNKNOWN_LEASE
        later = await session.tickets(lease, 31, 1)
        assert w.store.tickets(lease) == {30: first[0], 31: later[0]}
        async with await w.session(identity=OTHER) as other:
            assert await refusal(other.tickets(lease, 0, 1)) == m.REFUSED_UNKNOWN_LEASE
            assert await refusal(other.lasting_ticket(lease, 1)) == m.REFUSED_UNKNOWN_LEASE
        w.store.renewals_blocked = True
        assert await refusal(session.tickets(lease, 0, 1)) == m.REFUSED_BUSY


async def test_tickets_come_with_a_lease_and_are_given_once() -> None:
    async with world() as w, await w.session() as session:
        lease = (await session.lease(2, 3)).lease
        first = w.store.tickets(lease)
        assert sorted(first) == [0, 1, 2]
        assert dict(enumerate(await session.tickets(lease, 0, 3))) == first
        assert w.store.tickets(lease) == first
        again = dict(enumerate(await session.tickets(lease, 0, 3)))
        assert again == w.store.tickets(lease)
        assert not set(again.values()) & set(first.values())
        another = (await session.lease(2, 2)).lease
        given = w.store.tickets(another)
        assert await session.tickets(another, 0, 1) == [given[0]]
        more = (await session.lease(2, 1)).lease
        assert len(await session.tickets(more, 0, 2)) == 2


async def test_tickets_that_came_with_a_lease_long_ago_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_FIRST_TICKETS_S", 0.0)
    async with world() as w, await w.session() as session:
        lease = (await session.lease(2, 2)).lease
        first = w.store.tickets(lease)
        assert dict(enumerate(await session.tickets(lease, 0, 2))) == w.store.tickets(lease)
        assert w.store.tickets(lease) != first


async def test_a_lease_is_granted_where_tickets_cannot_be_given_yet() -> None:
    async with world() as w, await w.session() as session:
        w.store.renewals_blocked = True
        lease = await session.lease(2, 2)
        assert not lease.tickets
        w.store.renewals_blocked = False
        assert len(await session.tickets(lease.lease, 0, 2)) == 2


async def test_a_lasting_ticket_ends_with_the_session() -> None:
    async with world(daemon__lease_grace_s=30) as w:
        session = await w.session()
        lease = (await session.lease(1)).lease
        (once,) = await session.tickets(lease, 0, 1)
        lasting = await session.lasting_ticket(lease, 8)
        assert w.store.tickets(lease) == {0: once, m.TICKET_NUMBERS: lasting}
        await session.close()
        await until(lambda: w.store.tickets(lease) == {0: once})


async def test_a_renewal_that_cannot_fence_grants_nothing() -> None:
    async with world(daemon__lease_grace_s=30) as w:
        first = await w.session()
        lease = await first.lease(1)
        await first.close()
        async with await w.session() as second:
            w.store.renewals_blocked = True
            request = second.renew(lease.lease, lease.reclaim, lease.epoch)
            assert await refusal(request) == m.REFUSED_BUSY
            w.store.renewals_blocked = False
            assert (await second.renew(lease.lease, lease.reclaim, lease.epoch)).epoch == 2


async def test_a_data_connection_alone_keeps_the_lease_for_an_hour_at_most() -> None:
    slept_s = 0.0
    async with world(clock=lambda: time.monotonic() + slept_s) as w:
        session = await w.session()
        lease = await session.lease(4)
        await session.map(lease.lease, 1)
        w.store.set_connections(lease.lease, 1)
        await until(lambda: w.donor.service.status().leases[0].connections == 1)
        # With a session as long as it likes.
        slept_s += 7200.0
        await asyncio.sleep(0.3)
        assert w.store.stats()["leases"] == 1
        await session.close()
        await until(lambda: not w.donor.server.sessions)
        slept_s += 3500.0
        await asyncio.sleep(0.3)
        assert w.store.stats()["leases"] == 1
        slept_s += 100.0
        await until(lambda: w.store.stats()["leases"] == 0)
        assert w.store.stats()["slabs_mapped"] == 0
        assert w.donor.service.counters["leases_expired"] == 1
        async with await w.session() as again:
            reason = await refusal(again.renew(lease.lease, lease.reclaim, lease.epoch))
            assert reason == m.REFUSED_UNKNOWN_LEASE


async def test_a_silent_peer_loses_its_session_but_not_at_once_its_lease() -> None:
    async with world(daemon__lease_grace_s=30, cluster__heartbeats_missed_max=4) as w:
        async with LossyLink(w.address) as link:
            handler = Handler()
            config = client_config(send_s=0.5)
            session = await connect(link.address, IDENTITY, config, handler)
            lease = await session.lease(1)
            link.stall()
            ended = await asyncio.wait_for(session.wait_ended(), WAIT_S)
            assert ended.reason == m.GOODBYE_SILENCE
            await until(lambda: not w.donor.server.sessions)
            assert w.store.stats()["leases"] == 1
            with pytest.raises(SessionLostError):
                await session.memory()
            link.resume()
            await session.close()
        async with await w.session() as again:
            await again.renew(lease.lease, lease.reclaim, lease.epoch)


async def test_a_cut_connection_ends_the_session_and_what_waits_on_it() -> None:
    async with world() as w, LossyLink(w.address) as link:
        handler = Handler()
        session = await connect(link.address, IDENTITY, client_config(), handler)
        link.stall()
        waiting = asyncio.create_task(session.memory())
        await asyncio.sleep(0.05)
        link.cut()
        with pytest.raises(SessionLostError):
            await waiting
        await session.close()
        assert [ended.reason for ended in handler.ends] == [LOST]


# ------------------------------------------------------------- what the donor asks for


async def test_an_eviction_waits_for_done() -> None:
    async with world() as w:
        handler = Handler()
        handler.answer_evict.clear()
        async with await w.session(handler) as session:
            lease = await session.lease(2)
            slot = await session.map(lease.lease, 0)
            eviction = asyncio.create_task(
                w.donor.service.lent.evict(lease.lease, slot.slot, 20_000)
            )
            await asyncio.sleep(0.1)
            assert w.store.stats()["slabs_mapped"] == 1
            handler.answer_evict.set()
            await eviction
            assert handler.evicted == [(lease.lease, slot.slot, slot.generation)]
            assert w.store.stats()["slabs_mapped"] == 0


async def test_a_stopping_donor_says_goodbye() -> None:
    handler = Handler()
    async with world() as w:
        session = await w.session(handler)
        address = w.address
    assert handler.ends[0].reason == m.GOODBYE_SHUTDOWN
    assert handler.ends[0].by_peer
    await session.close()
    with pytest.raises(NoDonorError, match="refused"):
        await connect(address, IDENTITY, client_config(), Handler())


# --------------------------------------------------------------------- the pool's loop


async def test_returned_slabs_are_scrubbed() -> None:
    async with world() as w, await w.session() as session:
        lease = await session.lease(1)
        for _ in range(12):
            slot = await session.map(lease.lease, 0)
            await session.unmap(lease.lease, slot.slot, slot.generation)
        await until(lambda: w.store.stats()["slabs_dirty"] == 0)


async def test_unreadable_figures_do_not_stop_the_daemon() -> None:
    async with world() as w, await w.session() as session:
        w.memory.broken = True
        await until(lambda: w.donor.harvester.counters["harvest_errors"] > 2)
        assert await refusal(session.memory()) == m.REFUSED_ERROR
        w.memory.broken = False
        assert (await session.memory()).can_map == 8


# ---------------------------------------------------------------- mapped ahead of need

OTHER = Identity("00000000-0000-0000-0000-00000000000b", "swap1", "another consumer")


async def free_slabs(w: World, count: int) -> None:
    await until(lambda: w.store.stats()["slabs_free"] == count)


async def test_an_eviction_whose_session_ends_asks_on_the_next_one() -> None:
    """A device that is back already must not lose the slab without a word."""
    async with world(cluster__heartbeats_missed_max=100) as w:
        gone, back = Handler(), Handler()
        gone.answer_evict.clear()
        async with await w.session(gone) as first, await w.session(back) as second:
            lease = await first.lease(1)
            slot = await first.map(lease.lease, 0)
            eviction = asyncio.create_task(
                w.donor.service.lent.evict(lease.lease, slot.slot, 60_000)
            )
            await until(lambda: bool(gone.move_s))
            await second.renew(lease.lease, lease.reclaim, lease.epoch)
            first.end()
            gone.answer_evict.set()  # too late
            assert await eviction
            assert back.evicted == [(lease.lease, slot.slot, slot.generation)]


async def test_a_mapping_ahead_takes_a_free_slab_and_never_makes_room() -> None:
    async with world(daemon__pool="2M") as w:
        handler = Handler()
        elsewhere = w.session(identity=OTHER, host="10.0.0.2")  # with a share of its own
        async with await w.session(handler) as first, await elsewhere as second:
            ours, theirs = await first.lease(4), await second.lease(4)
            await first.map(ours.lease, 0)
            await free_slabs(w, 1)
            await second.map(theirs.lease, 0, ahead=True)
            await first.map(ours.lease, 1)  # the untouched one yields
            assert await refusal(second.map(theirs.lease, 0, ahead=True)) == m.REFUSED_NO_MEMORY
            assert not handler.evicted
            await second.map(theirs.lease, 0)  # which is another matter: it has its share
            assert len(handler.evicted) == 1


async def test_slabs_mapped_ahead_yield_first_when_others_ask() -> None:
    async with world(daemon__pool="3M") as w:
        handler = Handler()
        handler.rates = {0: 0.0, 1: 1e6, 2: 1e6}  # by activity it would be the other one
        async with await w.session(handler) as first, await w.session(identity=OTHER) as second:
            ours, theirs = await first.lease(4), await second.lease(4)
            used = await first.map(ours.lease, 0)
            for slab in (1, 2):
                await until(lambda: w.store.stats()["slabs_free"] > 0)
                await first.map(ours.lease, slab, ahead=True)
            assert (await second.memory()).free_slabs == 0
            assert (await second.memory()).can_map == 2
            await second.map(theirs.lease, 0)
            await second.map(theirs.lease, 1)
            assert (ours.lease, used.slot, used.generation) not in handler.evicted
            assert len(handler.evicted) == 2
            assert handler.move_s == [0.0, 0.0]  # nothing is there to be copied


async def test_a_slab_mapped_ahead_that_is_in_use_yields_no_longer() -> None:
    async with world(daemon__pool="1M") as w:
        handler = Handler()
        async with await w.session(handler) as first, await w.session(identity=OTHER) as second:
            ours, theirs = await first.lease(1), await second.lease(1)
            await free_slabs(w, 1)
            slot = await first.map(ours.lease, 0, ahead=True)
            await first.keep(ours.lease, slot.slot, slot.generation + 1)  # of another mapping
            assert (await second.memory()).can_map == 1
            assert await refusal(second.keep(ours.lease, 0, 1)) == m.REFUSED_UNKNOWN_LEASE
            await first.keep(ours.lease, slot.slot, slot.generation)
            assert (await second.memory()).can_map == 0
            assert await refusal(second.map(theirs.lease, 0)) == m.REFUSED_NO_MEMORY
            assert not handler.evicted


async def test_a_host_short_of_memory_takes_slabs_mapped_ahead_first() -> None:
    async with world(daemon__pool="3M") as w:
        handler = Handler()
        handler.rates = {0: 0.0, 1: 1e6, 2: 1e6}
        async with await w.session(handler) as session:
            lease = await session.lease(4)
            for slab in range(3):
                await until(lambda: w.store.stats()["slabs_free"] > 0)
                await session.map(lease.lease, slab, ahead=slab > 0)
            assert await w.donor.service.evict_some(2, urgent=False) == 2
            assert {slot for _, slot, _ in handler.evicted} == {1, 2}
            assert await w.donor.service.evict_some(1, urgent=False) == 1


async def test_a_slab_that_becomes_free_is_for_whoever_waits() -> None:
    async with world(daemon__pool="2M") as w:
        handler = Handler()
        handler.answer_evict.clear()
        async with await w.session(handler) as first, await w.session(identity=OTHER) as second:
            ours, theirs = await first.lease(4), await second.lease(4)
            used = await first.map(ours.lease, 0)
            await free_slabs(w, 1)
            await first.map(ours.lease, 1, ahead=True)
            waiting = asyncio.create_task(second.map(theirs.lease, 0))
            await until(lambda: bool(handler.move_s))
            await first.unmap(ours.lease, used.slot, used.generation)
            await free_slabs(w, 1)
            if not waiting.done():  # the donor gives up waiting after a while
                assert await refusal(first.map(ours.lease, 2, ahead=True)) == m.REFUSED_NO_MEMORY
            handler.answer_evict.set()
            await waiting


# --------------------------------------------------------------------- bad neighbours


async def test_only_the_same_secret_opens_a_session(secret_file: Path) -> None:
    async with world(cluster__secret_file=secret_file) as w:
        async with await w.session() as session:
            assert (await session.memory()).can_map == 8
        await fetch_status(w.address, client_config())
        for keys, text in ((ANOTHER, "differ"), (None, "none is configured")):
            with pytest.raises(WrongSecretError, match=text):
                await w.session(keys=keys)
            with pytest.raises(WrongSecretError):
                await fetch_status(w.address, client_config(keys=keys))
        assert (await fetch_version(w.address, client_config(keys=None))).product == "infiniswap"


async def test_a_donor_of_another_secret_is_not_believed() -> None:
    async with hostile() as donor:
        donor.keys = ANOTHER
        donor.body = json.dumps(status()).encode()
        config = client_config()
        with pytest.raises(WrongSecretError, match="does not prove"):
            await connect(donor.address, IDENTITY, config, Handler())
        with pytest.raises(WrongSecretError, match="does not prove"):
            await fetch_status(donor.address, config)


async def test_a_session_key_borrows_and_drains_nothing(secret_file: Path, tmp_path: Path) -> None:
    write_secret(tmp_path / "session-key", KEYS.session_key_text())
    session_alone = client_config(keys=read_secret(tmp_path / "session-key"))
    async with world() as w:
        async with await w.session(keys=session_alone.keys) as session:
            await session.lease(1)
        await fetch_status(w.address, session_alone)
        with pytest.raises(NotPermittedError, match="session key alone"):
            await set_draining(w.address, session_alone, True)
        # Nor where it pretends that the session key is the operator key.
        forged = client_config(keys=replace(KEYS, operator=KEYS.session))
        with pytest.raises(WrongSecretError):
            await set_draining(w.address, forged, True)
        assert not w.donor.service.drain.is_active
        assert (await set_draining(w.address, client_config(), True)).draining


async def test_a_donor_says_nothing_that_depends_on_the_secret_to_strangers() -> None:
    """Whatever it says before the proof is random, or the same under any other secret."""
    async with world() as w:
        digest = w.donor.server._config.tls.digest
        async with raw(w) as ws:
            first = hello()
            challenge = await say(ws, first)
            assert isinstance(challenge, m.Challenge)
            said = m.encode(challenge).decode()
            transcript = transcript_of(digest, first, challenge)
            for role in (auth.donor_proof, auth.consumer_proof):
                assert role(KEYS.session, transcript) not in said
            assert set(json.loads(said)) == {"type", "version", "versions", "nonce"}
            answer = await say(ws, m.Auth(proof="0" * 64))
            assert (type(answer), answer.reason) == (m.Goodbye, m.GOODBYE_SECRET)
        assert w.donor.server.counters["secret_errors"] == 1


async def test_a_reflected_proof_is_refused() -> None:
    async with world() as w, raw(w) as ws:
        first = hello()
        transcript = transcript_of(peer_digest(ws), first, await say(ws, first))
        answer = await say(ws, m.Auth(proof=auth.donor_proof(KEYS.session, transcript)))
        assert (type(answer), answer.reason) == (m.Goodbye, m.GOODBYE_SECRET)
        assert w.donor.server.counters["secret_errors"] == 1


async def test_a_replayed_http_proof_is_refused() -> None:
    connector = aiohttp.TCPConnector(ssl=client_context())
    async with world() as w, aiohttp.ClientSession(connector=connector) as http:
        url = f"https://{w.address}"
        async with http.get(url + m.NONCE_PATH) as response:
            nonce = await response.json()
        digest = w.donor.server._config.tls.digest
        request = auth.HttpRequest(digest, "GET", m.STATUS_PATH, nonce["nonce"])
        headers = {"Authorization": auth.http_authorization(KEYS.session, request)}
        statuses = []
        for path in (m.STATUS_PATH, m.STATUS_PATH, m.OPENAPI_PATH):
            async with http.get(url + path, headers=headers) as response:
                statuses.append(response.status)
        assert statuses == [200, 401, 401]


async def test_errors_at_the_two_ports_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        stored = w.store.stats() | {"protocol_errors": 5, "connections_refused": 6}
        monkeypatch.setattr(w.store, "stats", lambda: stored)
        w.donor.server.counters.update(protocol_errors=3, connections_refused=4)
        counters = (await fetch_status(w.address, client_config())).counters
        assert (counters["protocol_errors"], counters["data_protocol_errors"]) == (3, 5)
        assert (counters["connections_refused"], counters["data_connections_refused"]) == (4, 6)


async def test_many_nonces_take_none_away() -> None:
    """Whoever asks for them needs no proof."""
    connector = aiohttp.TCPConnector(ssl=client_context())
    async with world() as w, aiohttp.ClientSession(connector=connector) as http:
        made = []
        for _ in range(1100):
            async with http.get(f"https://{w.address}{m.NONCE_PATH}") as response:
                made.append((await response.json())["nonce"])
        assert len(set(made)) == len(made)
        request = auth.HttpRequest(w.donor.server._config.tls.digest, "GET", m.STATUS_PATH, made[0])
        headers = {"Authorization": auth.http_authorization(KEYS.session, request)}
        async with http.get(f"https://{w.address}{m.STATUS_PATH}", headers=headers) as response:
            assert response.status == 200


async def test_an_unproven_peer_gets_no_further_than_the_handshake(secret_file: Path) -> None:
    async with world(cluster__secret_file=secret_file) as w:
        async with raw(w) as ws:
            answer = await say(ws, m.LeaseRequest(id=1, slots_max=1))
            assert answer.reason == m.GOODBYE_PROTOCOL
        async with raw(w) as ws:
            await say(ws, hello())
            answer = await say(ws, m.LeaseRequest(id=1, slots_max=1))
            assert answer.reason == m.GOODBYE_PROTOCOL
        assert w.store.stats()["leases"] == 0


async def test_a_client_meets_a_donor_of_another_version() -> None:
    async with hostile() as donor:
        detail = "this donor speaks protocol 9, not 2"
        donor.greeting = m.Goodbye(reason=m.GOODBYE_VERSION, detail=detail)
        with pytest.raises(ProtocolMismatchError, match="protocol 9") as caught:
            await connect(donor.address, IDENTITY, client_config(), Handler())
    assert "same release" in caught.value.mend


async def test_another_slab_size_is_refused_before_anything_is_leased() -> None:
    async with world() as w:
        with pytest.raises(SlabSizeMismatchError, match=r"1M.*1G"):
            await connect(w.address, IDENTITY, client_config(), Handler(), slab_bytes=GIB)
        assert w.store.stats()["leases"] == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 64,
        b"NBDMAGICIHAVEOPT\x00\x03\x00\x00\x00\x03",
        b"GET / HTTP/1.1\r\n" + b"A" * 70_000,
        b"POST /v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + secrets.token_bytes(500),
        b"GET /v1/session HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ],
    ids=["zeros", "nbd", "long", "post", "tls", "half"],
)
async def test_garbage_on_the_control_port_harms_nobody(garbage: bytes) -> None:
    async with world() as w, await w.session() as session, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(w.address.host, w.address.port)
        writer.write(garbage)
        with contextlib.suppress(ConnectionError):
            if writer.can_write_eof():
                writer.write_eof()
            await reader.read()
        writer.close()
        await session.memory()


async def test_an_idle_connection_is_closed() -> None:
    async with world(handshake_s=0.5) as w, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(w.address.host, w.address.port)
        assert await reader.read() == b""
        writer.close()
        async with raw(w) as ws:
            message = await ws.receive_str()
            assert json.loads(message)["reason"] == m.GOODBYE_SILENCE


# -------------------------------------------------------- what is no donor, told apart


async def error_of(address: HostPort, **changes: Any) -> InfiniswapError:
    config = client_config(**{"connect_s": WAIT_S, **changes})
    errors = []
    for attempt in (connect(address, IDENTITY, config, Handler()), fetch_status(address, config)):
        with pytest.raises(InfiniswapError) as caught:
            await attempt
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(address) in errors[0].where
    assert errors[0].mend
    return errors[0]


async def test_nothing_listens_there() -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    error = await error_of(HostPort("127.0.0.1", port))
    assert isinstance(error, NoDonorError)
    assert "refused" in error.what


async def test_an_unknown_name() -> None:
    error = await error_of(HostPort("no-such-host.invalid", 9400))
    assert isinstance(error, NoDonorError)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", ProtocolMismatchError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ProtocolMismatchError),
        (b"NBDMAGICIHAVEOPT\x00\x03", ProtocolMismatchError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", ProtocolMismatchError),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", ProtocolMismatchError),
        (None, NoDonorError),
    ],
    ids=["closes", "ssh", "nbd", "http", "redirect", "silent"],
)
async def test_another_protocol_on_the_port(
    answer: bytes | None, kind: type[InfiniswapError]
) -> None:
    ends: list[asyncio.Task[Any] | None] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            if answer is None:
                await reader.read()
            else:
                await reader.read(1)
                writer.write(answer)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as listener:
        address = HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
        # Only silence is waited out.
        error = await error_of(address, **({"connect_s": 0.5} if answer is None else {}))
        assert type(error) is kind
        await asyncio.wait([task for task in ends if task is not None])


# ----------------------------------------------------------------------------- start-up


async def test_a_host_too_small_for_one_slab_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no room for a slab"):
        async with world(daemon__slab="4G", daemon__pool="auto"):
            pass


async def test_status_shows_leases_and_no_secrets() -> None:
    async with world() as w, await w.session() as session:
        lease = await session.lease(2)
        await session.map(lease.lease, 0)
        (ticket,) = await session.tickets(lease.lease, 0, 1)
        told = await fetch_status(w.address, client_config())
        assert told.control_port == w.address.port
        assert [(entry.device_name, entry.slots_mapped) for entry in told.leases] == [("swap0", 1)]
        assert told.pool.slabs_mapped == 1
        text = m.encode(told).decode()
        assert ticket not in text
        assert lease.reclaim not in text
