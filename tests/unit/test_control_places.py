# SPDX-License-Identifier: Apache-2.0
"""infiniswap.control.places: who has a place at a port, and who gives way."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from infiniswap.control.places import KNOWN_S, ConnectionPlaces

PLACES, PER_HOST = 40, 8


def places() -> ConnectionPlaces[int]:
    return ConnectionPlaces(PLACES, PER_HOST)


def fill(
    p: ConnectionPlaces[int], peer: str, first: int, number: int, now_s: float = 0.0
) -> list[int]:
    """Connections `first`, `first` + 1, ...; those that lost their places for them."""
    lost = []
    for connection in range(first, first + number):
        is_in, losers = p.enter(peer, connection, now_s)
        assert is_in
        lost += losers
    return lost


def test_silent_connections_keep_nobody_out_at_their_own_address() -> None:
    p = places()
    assert fill(p, "a", 0, 100) == list(range(92))  # the longest waiting one each time
    assert fill(p, "a", 1000, 1) == [92]  # the honest one
    p.proved(1000, 0.0)
    assert 1000 not in fill(p, "a", 2000, 500)
    assert len(p) == PER_HOST + 1


def test_strangers_leave_places_for_hosts_that_proved_themselves() -> None:
    p = places()
    fill(p, "honest", 0, 1)
    p.proved(0, 0.0)
    p.leave(0)
    # Many addresses at once, after half an hour.
    lost = []
    for number in range(1000):
        lost += fill(p, f"stranger-{number}", 1000 + number, 1, 1800.0)
    assert len(p) == PLACES // 2
    assert fill(p, "honest", 1, PER_HOST, 1800.0) == []
    assert fill(p, "another stranger", 5000, 1, 1800.0) == [1000 + 1000 - PLACES // 2]
    # After an hour it is a stranger itself.
    assert p.is_known("honest", KNOWN_S - 1)
    assert not p.is_known("honest", KNOWN_S)


def test_at_a_full_port_strangers_displace_strangers_alone() -> None:
    p = ConnectionPlaces[int](8, 8)
    fill(p, "honest", 0, 1)
    p.proved(0, 0.0)
    fill(p, "honest", 1, 7)
    assert p.enter("stranger", 100, 0.0) == (False, [])
    p.leave(7)
    assert p.enter("stranger", 100, 0.0) == (True, [])
    assert p.enter("other stranger", 101, 0.0) == (True, [100])
    assert p.enter("honest", 8, 0.0) == (True, [101])
    assert p.enter("honest", 9, 0.0) == (True, [1])  # its own


def test_proved_connections_have_their_limit_and_stay() -> None:
    p = places()
    for number in range(PER_HOST):
        fill(p, "a", number, 1)
        p.proved(number, 0.0)
    assert p.enter("a", 100, 0.0) == (False, [])
    assert p.enter("b", 100, 0.0) == (True, [])
    p.leave(3)
    assert p.enter("a", 101, 0.0) == (True, [])


def test_a_connection_that_lost_its_place_cannot_prove_itself() -> None:
    p = places()
    fill(p, "a", 0, PER_HOST + 1)
    p.proved(0, 0.0)
    assert not p.is_known("a", 0.0)
    p.leave(0)
    assert len(p) == PER_HOST


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_loses_a_proved_place_or_the_count(seed: int) -> None:
    random, p, numbers = Random(seed), places(), count()
    waiting: dict[int, str] = {}
    proved: dict[int, str] = {}
    for step in range(2000):
        now_s = step * 10.0
        what = random.random()
        if what < 0.6:
            peer, number = random.choice("abcdefghijkl"), next(numbers)
            is_in, lost = p.enter(peer, number, now_s)
            for loser in lost:
                del waiting[loser]  # a KeyError: it was proved, or gone
            if is_in:
                waiting[number] = peer
        elif what < 0.8 and waiting:
            number = random.choice(list(waiting))
            p.proved(number, now_s)
            proved[number] = waiting.pop(number)
        elif proved or waiting:
            number = random.choice([*proved, *waiting])
            p.leave(number)
            proved.pop(number, None)
            waiting.pop(number, None)
        assert len(p) == len(waiting) + len(proved) <= PLACES
    for number in [*proved, *waiting]:
        p.leave(number)
    assert len(p) == 0


def test_no_flood_of_strangers_takes_a_trusted_peers_place() -> None:
    p = ConnectionPlaces[int](8, 8, frozenset({"root"}))
    for number in range(4):
        assert p.enter("root", number, 0.0) == (True, [])
    for number in range(4, 20):
        _, lost = p.enter(f"user {number}", number, 0.0)
        assert not set(lost) & {0, 1, 2, 3}
    assert p.is_known("root", 0.0)
