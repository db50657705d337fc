# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.leases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.donors.lease_records import lease_record
from support.donors.refusals import refused

from infiniswap.control import messages as m
from infiniswap.donor.leases import (
    CONSUMER_SLOTS_MAX,
    SESSION_LEASES_MAX,
    GrantedLease,
    LeaseState,
    LeaseTable,
    consumer_leases,
)
from infiniswap.fields import SLOTS_MAX

RECORD = lease_record(7)
HOST, DEVICE, RECLAIM = "10.0.0.7", RECORD.device_id, RECORD.reclaim


def table_with_lease() -> LeaseTable:
    table = LeaseTable(grace_s=10.0, leases_max=4)
    table.session_opened(1)
    table.grant(RECORD, 1, 0.0)
    return table


def grant_used(table: LeaseTable, number: int, session: int = 0, **fields: Any) -> None:
    """A lease with a slab."""
    table.grant(lease_record(number, **fields), session, 0.0)
    table.mapped(number, m.SlotInfo(0, 1, 0))


def reclaim(table: LeaseTable, session: int, epoch: int = 1) -> GrantedLease:
    """By a new session of the lease's device."""
    table.session_opened(session)
    return table.reclaim(7, DEVICE, RECLAIM, epoch, session)


def test_a_lease_without_a_session_lives_by_its_grace_or_an_hour_by_its_connections() -> None:
    table = table_with_lease()
    (lease,) = table.session_closed(1, 100.0)
    for now_s, connections, state in (
        (105.0, 0, LeaseState.GRACE),
        (109.9, 1, LeaseState.ACTIVE),
        (111.0, 0, LeaseState.GRACE),
        (120.9, 0, LeaseState.GRACE),
        (120.9, 1, LeaseState.ACTIVE),
        (3699.9, 1, LeaseState.ACTIVE),
    ):
        assert table.observe([(7, connections)], now_s) == []
        assert lease.state is state
    assert table.observe([(7, 1)], 3700.0) == [lease]
    assert table.observe([(7, 1)], 3701.0) == []
    assert lease.state is LeaseState.EXPIRED


ELAPSED_S = st.sampled_from([0.0, 0.5, 9.5, 10.0, 29.5, 30.0]) | st.floats(0.0, 40.0)
EVENTS = st.sampled_from(["session", "no session", "connections", "no connections"])


@given(st.lists(st.tuples(ELAPSED_S, EVENTS), max_size=30))
def test_a_lease_ends_with_its_grace_or_its_time_alone_and_never_sooner(
    steps: list[tuple[float, str]],
) -> None:
    table = LeaseTable(10.0, 4, alone_s=30.0)
    session, connections, now_s = 1, 0, 0.0
    is_open, away_since_s, idle_since_s = True, 0.0, 0.0
    table.session_opened(session)
    table.grant(RECORD, session, now_s)
    for elapsed_s, event in steps:
        now_s += elapsed_s
        was_used = is_open or connections > 0
        if event == "session" and not is_open:
            is_open, session = True, session + 1
            reclaim(table, session)
        elif event == "no session" and is_open:
            is_open, away_since_s = False, now_s
            table.session_closed(session, now_s)
        elif event == "connections":
            connections = 1
        elif event == "no connections":
            connections = 0
        if was_used and not is_open and not connections:
            idle_since_s = now_s
        ended = table.observe([(7, connections)], now_s)
        since_s, most_s = (away_since_s, 30.0) if connections else (idle_since_s, 10.0)
        assert bool(ended) == (not is_open and now_s >= since_s + most_s)
        if ended:
            return


def test_only_the_owning_session_may_use_a_lease() -> None:
    table = table_with_lease()
    table.session_opened(2)
    assert table.owned(7, 1).lease == 7
    for lease, session in ((7, 2), (8, 1)):
        with refused(m.REFUSED_UNKNOWN_LEASE):
            table.owned(lease, session)


@pytest.mark.parametrize(
    ("lease", "device", "secret"),
    [(8, DEVICE, RECLAIM), (7, "other", RECLAIM), (7, DEVICE, "6" * 32)],
)
def test_a_reclaim_needs_number_device_and_secret(lease: int, device: str, secret: str) -> None:
    table = table_with_lease()
    table.session_closed(1, 0.0)
    table.session_opened(2)
    with refused(m.REFUSED_UNKNOWN_LEASE):
        table.reclaim(lease, device, secret, 1, 2)
    assert table.leases()[0].session is None


def test_a_reclaimed_lease_belongs_to_the_new_session_though_it_may_miss_the_answer() -> None:
    table = table_with_lease()
    table.session_closed(1, 0.0)
    reclaim(table, 2)
    table.renewed(7, 2)
    assert table.observe([(7, 0)], 1000.0) == []
    assert table.owned(7, 2).record.epoch == 2
    table.session_closed(2, 1000.0)
    assert reclaim(table, 3).session == 3


def test_a_late_renewal_cannot_take_the_lease_from_a_newer_session() -> None:
    table = table_with_lease()
    reclaim(table, 2)
    table.renewed(7, 2)
    with refused(m.REFUSED_STALE):
        table.reclaim(7, DEVICE, RECLAIM, 1, 1)
    with refused(m.REFUSED_STALE):
        table.reclaim(7, DEVICE, RECLAIM, 3, 2)
    assert table.owned(7, 2)


def test_a_session_that_is_gone_gets_nothing() -> None:
    table = table_with_lease()
    table.session_closed(1, 0.0)
    with refused(m.REFUSED_UNKNOWN_LEASE):
        table.reclaim(7, DEVICE, RECLAIM, 1, 1)
    lease = table.grant(lease_record(8), 1, 5.0)
    assert lease.state is LeaseState.GRACE
    assert lease.grace_until_s == 15.0


def test_an_expired_lease_never_comes_back() -> None:
    table = table_with_lease()
    table.session_closed(1, 0.0)
    table.observe([(7, 0)], 10.0)
    with refused(m.REFUSED_UNKNOWN_LEASE):
        reclaim(table, 2)
    table.observe([(7, 5)], 11.0)
    assert table.leases()[0].state is LeaseState.EXPIRED
    table.remove(7)
    assert len(table) == 0


def test_leases_are_limited() -> None:
    table = table_with_lease()
    table.mapped(7, m.SlotInfo(0, 1, 0))
    for number in range(3):
        assert table.check_room(number, HOST, 8) is None
        grant_used(table, 10 + number)
    with refused(m.REFUSED_QUOTA):
        table.check_room(9, "10.0.0.8", 8)
    with pytest.raises(ValueError, match="exists"):
        table.grant(RECORD, 1, 0.0)


def test_one_session_has_so_many_leases_and_no_more() -> None:
    table = LeaseTable(10.0, 100)
    for session in (1, 2):
        table.session_opened(session)
    for number in range(SESSION_LEASES_MAX):
        table.check_room(1, HOST, 8)
        table.grant(lease_record(number), 1, 0.0)
    with refused(m.REFUSED_QUOTA):
        table.check_room(1, HOST, 8)
    # Not by way of another session of the same device either.
    table.check_room(2, HOST, 8)
    table.grant(lease_record(50), 2, 0.0)
    with refused(m.REFUSED_QUOTA):
        table.reclaim(50, DEVICE, RECLAIM, 1, 1)
    assert table.owned(50, 2)


def test_one_host_has_so_many_leases_whatever_names_it_gives_itself() -> None:
    table = LeaseTable(10.0, 100, consumer_leases_max=3)
    for number in range(3):
        table.check_room(number, HOST, 8)
        names: dict[str, Any] = {"host_name": f"host-{number}", "device_id": f"device-{number}"}
        grant_used(table, number, **names)
    with refused(m.REFUSED_QUOTA):
        table.check_room(3, HOST, 8)
    table.check_room(3, "10.0.0.8", 8)
    # Those that are still being taken apart count, as they still are memory.
    table.expire(0)
    with refused(m.REFUSED_QUOTA):
        table.check_room(3, HOST, 8)
    table.remove(0)
    table.check_room(3, HOST, 8)


def test_leases_over_loopback_count_for_the_user_who_has_them() -> None:
    table = LeaseTable(10.0, 100, consumer_leases_max=1)
    grant_used(table, 1, address="127.0.0.1:1", peer="user 0 of this host")
    table.check_room(2, "user 1000 of this host", 8)
    with refused(m.REFUSED_QUOTA):
        table.check_room(2, "user 0 of this host", 8)


def spare(table: LeaseTable, consumer: str, slots_max: int = 8) -> int | None:
    """The lease that would end for another one of that consumer."""
    found = table.check_room(99, consumer, slots_max)
    return None if found is None else found.lease


def test_a_lease_without_a_slab_goes_first_of_who_has_most() -> None:
    """One machine with five addresses had all 256."""
    table = LeaseTable(10.0, 8)
    table.session_opened(1)
    addresses = {number: f"10.0.0.{number % 3}:1" for number in range(1, 8)}
    for number, address in addresses.items():
        table.grant(lease_record(number, address=address), 1, 0.0)
    assert spare(table, "10.0.0.9") is None
    grant_used(table, 20, 1, address="10.0.0.8:1")
    # 10.0.0.1 has three; the others have two.
    assert spare(table, "10.0.0.9") == 1
    table.expire(1)
    assert spare(table, "10.0.0.9") == 2
    # First of all one whose device is away.
    table.remove(1)
    table.grant(lease_record(30, address="10.0.0.7:1"), 0, 0.0)
    assert spare(table, "10.0.0.9") == 30


def test_a_host_at_its_limit_ends_its_own_spare_leases() -> None:
    table = LeaseTable(10.0, 100, consumer_leases_max=2)
    table.session_opened(1)
    grant_used(table, 1, 1)
    table.grant(lease_record(2, slots_max=SLOTS_MAX), 1, 0.0)
    table.grant(lease_record(3, address="10.0.0.8:1"), 0, 0.0)
    assert spare(table, HOST) == 2
    table.remove(2)
    assert spare(table, HOST) is None


def test_the_slots_of_one_host_are_bounded() -> None:
    table = LeaseTable(10.0, 100)
    for number in range(CONSUMER_SLOTS_MAX // SLOTS_MAX):
        table.check_room(number, HOST, SLOTS_MAX)
        grant_used(table, number, slots_max=SLOTS_MAX)
    with refused(m.REFUSED_QUOTA):
        table.check_room(90, HOST, 1)
    table.check_room(90, "10.0.0.8", SLOTS_MAX)


def test_one_host_never_gets_all_leases() -> None:
    assert consumer_leases(256, 128) == 64  # two connections each
    assert consumer_leases(1024, 512) == 256
    assert consumer_leases(8, 128) == 4
    assert consumer_leases(1, 1) == 1


def test_the_reclaim_secret_is_not_printed() -> None:
    assert RECLAIM not in repr(table_with_lease().leases())
