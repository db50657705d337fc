# SPDX-License-Identifier: Apache-2.0
"""Harvest and eviction with a whole donor: figures in, slabs out, consumers asked over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from support.donors.donor_world import Handler, World, client_config, refusal, until, world

from infiniswap.control import messages as m
from infiniswap.control.client import Identity, Session, fetch_status
from infiniswap.errors import RequestRefusedError
from infiniswap.units import GIB, MIB

A = Identity("00000000-0000-0000-0000-0000000000aa", "swap0", "host-a")
B = Identity("00000000-0000-0000-0000-0000000000bb", "swap0", "host-b")
POOL = 8


@contextlib.asynccontextmanager
async def borrowing(
    w: World, identity: Identity, slabs: int, handler: Handler | None = None, host: str = ""
) -> AsyncIterator[tuple[Session, m.LeaseAnswer]]:
    """A consumer with so many slabs; host: see World.session."""
    async with await w.session(handler, identity, host) as session:
        lease = await session.lease(64)
        for slab in range(slabs):
            await session.map(lease.lease, slab)
        yield session, lease


@contextlib.contextmanager
def holding(handler: Handler) -> Iterator[None]:
    """The consumer does not answer evictions; afterwards it does (a session waits for that)."""
    handler.answer_evict.clear()
    try:
        yield
    finally:
        handler.answer_evict.set()


def leave(w: World, slabs: int) -> None:
    """Others take all memory but the headroom and so many slabs."""
    headroom_bytes = w.donor.harvester.policy.config.headroom_bytes
    w.memory.others_bytes = GIB - slabs * MIB - headroom_bytes


def held(w: World, identity: Identity) -> int:
    leases = w.donor.service.status().leases
    return sum(lease.slots_mapped for lease in leases if lease.host_name == identity.host_name)


def mapped(w: World) -> int:
    return w.store.stats()["slabs_mapped"]


async def test_a_sudden_shortage_takes_free_slabs_then_as_many_as_are_missing() -> None:
    async with world(daemon__preallocate_slabs=2) as w, borrowing(w, A, 5):
        await until(lambda: w.store.stats()["slabs_free"] == 2)
        leave(w, 6)
        await until(lambda: w.store.stats()["slabs_free"] == 1)
        assert mapped(w) == 5
        leave(w, 2)
        await until(lambda: mapped(w) == 2 and w.store.pool_bytes == 2 * MIB)
        assert w.donor.harvester.counters["slabs_released"] == 5
        # The host has its headroom again, so nothing more is taken.
        await asyncio.sleep(0.3)
        assert mapped(w) == 2
        w.memory.others_bytes = 0
        await until(lambda: w.store.stats()["slabs_free"] == 2)


@pytest.mark.parametrize("rates", [(900.0, 1.0), (1.0, 900.0)], ids=["first", "second"])
async def test_the_busy_consumer_is_spared(rates: tuple[float, float]) -> None:
    # So much headroom that the whole of what is missing can be seen at once.
    async with world(daemon__headroom="8M") as w:
        handlers = Handler(), Handler()
        for handler, rate in zip(handlers, rates, strict=True):
            handler.rates = dict.fromkeys(range(4), rate)
        async with borrowing(w, A, 4, handlers[0]), borrowing(w, B, 4, handlers[1]):
            leave(w, 3)
            await until(lambda: mapped(w) == 3)
            assert (held(w, A), held(w, B)) == ((3, 0) if rates[0] > rates[1] else (0, 3))
            assert sorted(len(handler.evicted) for handler in handlers) == [1, 4]


async def test_a_consumer_that_does_not_answer_loses_its_slab_and_holds_up_nobody() -> None:
    # Long enough for the one that answers, on any machine.
    async with world(daemon__evict_deadline_s=1.0) as w:
        hung, well = Handler(), Handler()
        async with borrowing(w, A, 3, hung), borrowing(w, B, 3, well):
            with holding(hung):
                leave(w, 0)
                # A worker thread takes them away; the event loop counts them afterwards.
                forced = w.donor.service.counters
                await until(lambda: forced["evictions_forced"] == 3 and not mapped(w))
                assert len(well.evicted) == 3


class Moving(Handler):
    """Copies its slabs for as long as it may, and until it is asked to hurry."""

    def __init__(self) -> None:
        super().__init__()
        self.hurried: dict[int, asyncio.Event] = {}

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
        hurried = self.hurried.setdefault(slot, asyncio.Event())
        if not move_s:
            hurried.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(move_s):
                await hurried.wait()
        await super().evict(lease, slot, generation, deadline_s, move_s, last_copy=last_copy)


async def test_there_is_time_to_move_a_slab_until_the_host_is_in_a_hurry() -> None:
    async with world(daemon__headroom="8M", daemon__evict_move_s=300.0) as w:
        moving = Moving()
        async with borrowing(w, A, 6, moving):
            leave(w, 4)  # less than the headroom, more than half of it
            await until(lambda: len(moving.hurried) == 2)
            assert mapped(w) == 6
            leave(w, -4)
            await until(lambda: mapped(w) == 0)
            assert w.donor.service.counters["evictions_forced"] == 0
            assert sum(move_s > 0.0 for move_s in moving.move_s) == 2
            assert len(moving.evicted) == 8  # two of them were asked for twice


async def test_a_session_that_ends_while_slabs_move_costs_none_of_them() -> None:
    """The device goes on copying them: without a backup they would be lost."""
    async with world(daemon__headroom="8M", daemon__evict_move_s=300.0) as w:
        moving = Moving()
        session = await w.session(moving, A)
        lease = await session.lease(64)
        for slab in range(3):
            await session.map(lease.lease, slab)
        w.store.set_connections(lease.lease, 1)  # pages flow
        leave(w, 1)
        await until(lambda: len(moving.hurried) == 2)
        for hurried in moving.hurried.values():
            hurried.set()  # its handlers must end for the session to
        moving.answer_evict.clear()
        closing = asyncio.create_task(session.close())
        await until(lambda: not w.donor.server.sessions)
        moving.answer_evict.set()
        await closing
        await asyncio.sleep(0.3)
        assert mapped(w) == 3
        # Nobody is asked, and nothing taken, until the host is in a hurry.
        leave(w, -7)
        await until(lambda: mapped(w) == 0)
        assert w.donor.service.counters["evictions_forced"] == 3


async def test_done_that_comes_too_late_changes_nothing() -> None:
    """By then the slot may hold another generation, which is somebody else's."""
    async with world(daemon__evict_deadline_s=0.1) as w:
        hung = Handler()
        async with borrowing(w, A, 1, hung) as (session, lease):
            with holding(hung):
                leave(w, 0)
                await until(lambda: mapped(w) == 0)
                w.memory.others_bytes = 0
                await until(lambda: w.store.stats()["slabs_free"] > 0)
                slot = await session.map(lease.lease, 0)
            await until(lambda: bool(hung.evicted))
            assert hung.evicted[0][2] != slot.generation
            assert mapped(w) == 1
            await session.memory()


async def test_a_slab_that_is_the_only_copy_stays() -> None:
    async with world() as w:
        fragile, well = Handler(), Handler()
        fragile.has_backup = False
        async with borrowing(w, A, 3, fragile), borrowing(w, B, 3, well):
            leave(w, 0)
            await until(lambda: held(w, B) == 0)
            await until(lambda: w.donor.service.counters["evictions_refused"] >= 3)
            assert held(w, A) == 3


async def test_last_copies_go_when_nothing_else_mends_the_headroom() -> None:
    """A donor cannot check what a consumer says of its copies: its host comes first in the end."""
    async with world() as w:
        evictor = w.donor.service.evictor
        evictor.config = replace(evictor.config, refused_s=0.5, last_copy_s=0.5)
        hostile, well = Handler(), Handler()
        hostile.has_backup = False
        async with borrowing(w, A, 3, hostile), borrowing(w, B, 3, well):
            leave(w, 0)
            # A worker thread takes them away; the event loop counts them afterwards.
            counters = w.donor.service.counters
            await until(lambda: counters["evictions_forced"] == 3 and not mapped(w))
            assert len(well.evicted) == 3
            assert well.last_copies == 0
            assert hostile.last_copies == counters["evictions_last_copies"] == 3


async def test_a_short_shortage_takes_no_last_copy() -> None:
    async with world() as w:
        fragile = Handler()
        fragile.has_backup = False
        async with borrowing(w, A, 3, fragile):
            counters = w.donor.service.counters
            for _ in range(2):  # the time of the first does not count for the second
                counters["evictions_refused"] = 0
                leave(w, 0)
                await until(lambda: counters["evictions_refused"] > 0)
                w.memory.others_bytes = 0
                await until(lambda: w.donor.harvester.broken_since_s is None)
            assert (held(w, A), fragile.last_copies) == (3, 0)


async def test_a_consumer_that_keeps_slabs_gets_none_above_its_share() -> None:
    async with world() as w:
        greedy = Handler()
        greedy.has_backup = False
        async with (
            borrowing(w, A, POOL - 1, greedy, host="10.0.0.1") as (first, older),
            borrowing(w, B, 1, host="10.0.0.2") as (second, newer),
        ):
            assert await refusal(second.map(newer.lease, 1)) == m.REFUSED_NO_MEMORY
            assert greedy.move_s  # asked, and kept
            slot = w.donor.service.table.get(newer.lease)
            assert slot is not None
            (only,) = slot.slots.values()
            await second.unmap(newer.lease, only.slot, only.generation)
            await until(lambda: w.store.stats()["slabs_free"] == 1)
            answer = await first.memory()
            assert answer.can_map == 0
            assert "more than its share" in answer.no_room
            with pytest.raises(RequestRefusedError, match="more than its share"):
                await first.map(older.lease, POOL)
            await second.map(newer.lease, 1)


async def test_a_lease_whose_device_is_away_is_taken_without_asking() -> None:
    async with world(daemon__lease_grace_s=30.0) as w:
        async with borrowing(w, A, 2):
            pass
        await until(lambda: not w.donor.server.sessions)
        assert mapped(w) == 2
        leave(w, 0)
        await until(lambda: mapped(w) == 0)


async def test_a_newcomer_gets_its_share_of_a_full_pool() -> None:
    async with (
        world() as w,
        borrowing(w, A, POOL) as (first, _),
        borrowing(w, B, 0, host="10.0.0.2") as (second, newer),
    ):
        assert (await second.memory()).can_map == POOL // 2
        for slab in range(POOL // 2):
            await second.map(newer.lease, slab)
        assert (held(w, A), held(w, B)) == (POOL // 2, POOL // 2)
        # Neither can take more from the other.
        assert (await second.memory()).can_map == 0
        assert (await first.memory()).can_map == 0


@pytest.mark.parametrize(
    ("victim", "attacker", "kept"),
    [
        ("10.0.0.1", "10.0.0.66", POOL // 2),
        ("fd00:0:0:1::1", "fd00:0:0:2::{:x}", POOL // 2),
        ("10.0.0.66", "10.0.0.66", POOL),
        ("10.0.0.66", "::ffff:10.0.0.66", POOL),
        ("127.0.0.1", "127.0.0.{}", POOL),
    ],
    ids=["IPv4", "IPv6", "same address", "mapped", "loopback"],
)
async def test_names_that_a_host_invents_take_no_more_than_its_share(
    victim: str, attacker: str, kept: int
) -> None:
    async with (
        world() as w,
        borrowing(w, A, POOL, host=victim),
        contextlib.AsyncExitStack() as held_open,
    ):
        for number in range(20):
            name = Identity(f"00000000-0000-0000-0000-{number:012x}", "swap0", f"host-{number}")
            borrower = borrowing(w, name, 0, host=attacker.format(number + 2))
            session, lease = await held_open.enter_async_context(borrower)
            for slab in range(2):
                with contextlib.suppress(RequestRefusedError):
                    await session.map(lease.lease, slab)
        assert held(w, A) == kept


def of_tenant(identity: Identity, tenant: str) -> Identity:
    return replace(identity, use=m.LeaseUse(tenant=tenant))


async def test_a_new_tenant_of_a_host_gets_an_equal_part_of_what_the_host_has() -> None:
    sweep, one = of_tenant(A, "sweep"), of_tenant(B, "one")
    async with (
        world() as w,
        borrowing(w, sweep, POOL),
        await w.session(identity=one) as second,
        await w.session(identity=of_tenant(B, "sweep")) as third,
    ):
        # A device that has no lease yet is told what its tenant could get.
        assert (await second.memory()).can_map == POOL // 2
        assert (await third.memory()).can_map == 0
        newer = await second.lease(64)
        for slab in range(POOL // 2):
            await second.map(newer.lease, slab)
        assert (held(w, sweep), held(w, one)) == (POOL // 2, POOL // 2)
        assert (await second.memory()).can_map == 0
        assert await refusal(second.map(newer.lease, POOL // 2)) == m.REFUSED_NO_MEMORY


async def test_tenants_of_one_name_on_two_hosts_have_a_share_each() -> None:
    async with (
        world() as w,
        borrowing(w, of_tenant(A, "physics"), POOL, host="10.0.0.1"),
        borrowing(w, of_tenant(B, "physics"), 0, host="10.0.0.2") as (second, newer),
    ):
        for slab in range(POOL // 2):
            await second.map(newer.lease, slab)
        assert (held(w, A), held(w, B)) == (POOL // 2, POOL // 2)


async def test_a_host_with_twenty_tenants_has_the_share_of_one() -> None:
    async with (
        world() as w,
        borrowing(w, A, POOL, host="10.0.0.1"),
        contextlib.AsyncExitStack() as stack,
    ):
        for number in range(20):
            name = Identity(f"00000000-0000-0000-0000-{number:012x}", "swap0", "host-b")
            borrower = borrowing(w, of_tenant(name, f"t{number}"), 0, host="10.0.0.2")
            session, lease = await stack.enter_async_context(borrower)
            for slab in range(2):
                with contextlib.suppress(RequestRefusedError):
                    await session.map(lease.lease, slab)
        assert (held(w, A), held(w, B)) == (POOL // 2, POOL // 2)


async def test_cache_that_is_read_again_counts_as_used() -> None:
    async with world(daemon__preallocate_slabs=2) as w, borrowing(w, A, 6):
        await until(lambda: w.store.stats()["slabs_free"] == 2)
        # All memory but pool and headroom is page cache, which is available as long as it rests.
        w.memory.file_bytes = GIB - 9 * MIB
        await asyncio.sleep(0.3)
        assert w.store.stats()["slabs_free"] == 2
        # Two slabs' worth of it is read again between two readings, however far apart these are.
        w.memory.refault_step_bytes = 2 * MIB
        await until(lambda: w.store.stats()["slabs_free"] == 0)
        assert w.donor.service.status().memory.cache_bytes == GIB - 7 * MIB
        assert mapped(w) == 6
        # That was not enough: with what comes next mapped ones have to go.
        w.memory.file_bytes += 2 * MIB
        w.memory.refault_step_bytes = 4 * MIB
        await until(lambda: mapped(w) < 6)


async def test_a_hint_of_pressure_reads_the_figures_at_once_and_once() -> None:
    async with world(policy__period_s=60.0) as w:
        w.memory.total_bytes = 1024 * GIB
        await until(lambda: w.donor.harvester.figures.total_bytes == 1024 * GIB)
        await until(lambda: w.store.stats()["slabs_free"] == 2)
        await asyncio.sleep(0.3)
        reads = w.memory.reads
        w.donor.harvester.nudge()
        await until(lambda: w.memory.reads > reads)
        # A host that has plenty is left alone, however often its jobs wait at their own limits.
        await asyncio.sleep(0.5)
        assert w.memory.reads <= reads + 2  # the hint's, and that of a slab which was just made


@pytest.mark.parametrize(
    ("total", "others"),
    [(GIB, -5 * GIB), (0, 0), (-GIB, GIB)],
    ids=["more than there is", "nothing", "negative"],
)
async def test_figures_that_cannot_be_true_are_refused_and_counted(
    total: int, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world() as w, borrowing(w, A, 1) as (session, lease):
        await until(lambda: w.store.stats()["slabs_free"] == 2)
        w.memory.total_bytes, w.memory.others_bytes = total, others
        counters = w.donor.harvester.counters
        await until(lambda: counters["figures_refused"] > 2 and counters["harvest_errors"] > 2)
        assert caplog.text.count("memory figures that cannot be true") == 1
        assert await refusal(session.memory()) == m.REFUSED_ERROR
        # What is lent stays, what is free can still be had, and no more is made.
        assert mapped(w) == 1
        await session.map(lease.lease, 1)
        errors = counters["harvest_errors"]
        await until(lambda: counters["harvest_errors"] > errors + 2)
        assert (mapped(w), w.store.stats()["slabs_free"]) == (2, 1)
        w.memory.total_bytes, w.memory.others_bytes = GIB, 0
        await until(lambda: w.store.stats()["slabs_free"] == 2)
        await until(lambda: "memory can be harvested again" in caplog.text)
        assert 0.0 <= (await session.memory()).used_share <= 1.0


@pytest.mark.parametrize("evicted", [1, 3])
async def test_releasing_the_lease_in_the_middle_of_an_eviction_is_no_error(evicted: int) -> None:
    async with world() as w:
        handler = Handler()
        async with borrowing(w, A, evicted, handler) as (session, lease):
            with holding(handler):
                leave(w, 0)
                await until(lambda: w.donor.service.counters["eviction_batches"] > 0)
                await session.release(lease.lease)
            await until(lambda: mapped(w) == 0)
            await session.memory()
        assert w.donor.harvester.counters["harvest_errors"] == 0


async def reasons(w: World, session: Session, lease: int) -> set[str]:
    """Why it lends nothing: in its status, when it is asked for memory, and for a slab."""
    answer = await session.memory()
    assert answer.can_map == 0
    with pytest.raises(RequestRefusedError) as caught:
        await session.map(lease, 60)
    refused = caught.value.what.removeprefix("refused (no_memory): the donor ")
    status = await fetch_status(w.address, client_config())
    assert status.pool.can_map == 0
    return {status.no_room, answer.no_room, refused}


async def test_a_donor_that_lends_its_whole_pool_says_so() -> None:
    async with world() as w, borrowing(w, A, POOL) as (session, lease):
        (why,) = await reasons(w, session, lease.lease)
        assert why == "has lent its whole pool of 8.00 MiB (daemon.pool there), 8 slabs"


async def test_a_donor_that_needs_its_memory_says_how_much_it_keeps() -> None:
    async with world(daemon__headroom="64M") as w, borrowing(w, A, 1) as (session, lease):
        leave(w, 1)
        await until(lambda: not w.donor.harvester.pool.mappable())
        (why,) = await reasons(w, session, lease.lease)
        assert why.startswith("needs its memory itself: ")
        assert why.endswith("it keeps 64.0 MiB as headroom (daemon.headroom), and a slab takes 1M")


async def test_a_donor_whose_host_refuses_memory_says_so() -> None:
    async with world(daemon__preallocate_slabs=0) as w, borrowing(w, A, 0) as (session, lease):
        w.store.refuse_memory = True
        with pytest.raises(RequestRefusedError):
            await session.map(lease.lease, 0)
        (why,) = await reasons(w, session, lease.lease)
        assert why.startswith("gets no memory for another slab from its host, where ")


async def test_a_donor_that_is_drained_says_how_that_ends() -> None:
    async with world() as w, await w.session() as session:
        assert (await session.memory()).no_room == ""
        assert (await fetch_status(w.address, client_config())).no_room == ""
        await w.donor.service.set_draining(True)
        answer = await session.memory()
        status = await fetch_status(w.address, client_config())
        assert answer.no_room == status.no_room
        assert "infiniswap donor undrain" in answer.no_room
