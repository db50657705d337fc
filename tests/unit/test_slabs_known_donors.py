# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.known_donors: which donors there are, and which may be asked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.units import HostPort

A, B, C = (HostPort(f"10.0.0.{number}", 9400) for number in (1, 2, 3))


class Link:
    """In place of a DonorLink."""

    is_listed = is_usable = is_idle = True
    remote: int | None = None

    def __init__(self, address: HostPort) -> None:
        self.address = address


make = cast(Any, Link)


@pytest.fixture
def known_donors() -> KnownDonors:
    return KnownDonors(cast(Any, None), Alarms(), asyncio.Event())


def usable(known_donors: KnownDonors) -> list[HostPort]:
    return [link.address for link in known_donors.usable()]


def known(known_donors: KnownDonors) -> list[HostPort]:
    return [link.address for link in known_donors.links]


def test_who_is_not_listed_any_more_keeps_what_it_has_and_gets_nothing_more(
    known_donors: KnownDonors,
) -> None:
    known_donors.know((A, B, A), make)
    assert known(known_donors) == [A, B]
    first = cast(Any, known_donors.links[0])
    first.is_idle, first.remote = False, 7
    known_donors.know((C,), make)
    assert known(known_donors) == [A, C]
    assert usable(known_donors) == [C]
    known_donors.know((A, C), make)
    assert known_donors.links[0] is first
    assert usable(known_donors) == [A, C]
    # A slab is being placed: somebody may be about to ask it.
    known_donors.searches.add(0)
    known_donors.know((A,), make)
    assert known(known_donors) == [A, C]
    known_donors.searches.clear()
    known_donors.know((A,), make)
    assert known(known_donors) == [A]


def test_a_new_donor_wakes_the_mapper_and_a_known_one_does_not() -> None:
    wake = asyncio.Event()
    known_donors = KnownDonors(cast(Any, None), Alarms(), wake)
    known_donors.know((A,), make)
    assert wake.is_set()
    wake.clear()
    known_donors.know((A,), make)
    assert not wake.is_set()


async def test_a_donor_that_is_avoided_gets_nothing_for_a_while_and_an_alarm_says_so() -> None:
    alarms = Alarms()
    known_donors = KnownDonors(cast(Any, None), alarms, asyncio.Event())
    known_donors.know((A, B), make)
    link = known_donors.links[0]
    now_s = asyncio.get_running_loop().time()
    known_donors.avoided(link, "16 pages came back with other bytes")
    (alarm,) = alarms.values()
    assert alarm.startswith(f"donor {A} gets no further slabs for 10 s: 16 pages came back")
    assert "keeps those that it has" in alarm
    backoff = known_donors.backoff
    eligible = [link for link in known_donors.links if backoff.is_eligible(link, now_s + 5.0)]
    assert [link.address for link in eligible] == [B]
    known_donors.avoided(link, "32 pages came back with other bytes")
    (alarm,) = alarms.values()
    assert "for 20 s" in alarm
    known_donors.took(link)
    assert not alarms


def test_more_donors_than_an_engine_has_places_for_are_known_and_64_are_used(
    known_donors: KnownDonors,
) -> None:
    known_donors.know([HostPort("10.0.0.1", port) for port in range(1, 101)], make)
    assert len(known_donors.usable()) == 100
    for number, link in enumerate(known_donors.links[:64]):
        cast(Any, link).remote = number
    assert known_donors.usable() == known_donors.links[:64]


@pytest.mark.parametrize("ending", ["it takes a slab", "it is forgotten"])
async def test_the_alarm_of_a_distrusted_donor_is_its_own_and_ends(ending: str) -> None:
    alarms = Alarms()
    known_donors = KnownDonors(cast(Any, None), alarms, asyncio.Event())
    known_donors.know((A, B), make)
    liar, other = known_donors.links
    for link in (liar, other):
        known_donors.distrusted(link, "its replies break the protocol")
    assert (
        alarms[f"donor {A}"] == f"donor {A} was given up for 10 s: its replies break the protocol"
    )
    now_s = asyncio.get_running_loop().time()
    assert not any(known_donors.backoff.is_eligible(link, now_s) for link in known_donors.links)
    known_donors.distrusted(liar, "again")
    assert "for 20 s: again" in alarms[f"donor {A}"]
    if ending == "it takes a slab":
        known_donors.took(liar)
    else:
        known_donors.know((B,), make)
    assert list(alarms) == [f"donor {B}"]
