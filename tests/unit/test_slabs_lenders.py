# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.lenders: which donors there are, and which may be asked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.slabs.lenders import Lenders
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
def lenders() -> Lenders:
    return Lenders(cast(Any, None), Alarms(), asyncio.Event())


def usable(lenders: Lenders) -> list[HostPort]:
    return [link.address for link in lenders.usable()]


def known(lenders: Lenders) -> list[HostPort]:
    return [link.address for link in lenders.links]


def test_who_is_not_listed_any_more_keeps_what_it_has_and_gets_nothing_more(
    lenders: Lenders,
) -> None:
    lenders.know((A, B, A), make)
    assert known(lenders) == [A, B]
    first = cast(Any, lenders.links[0])
    first.is_idle, first.remote = False, 7
    lenders.know((C,), make)
    assert known(lenders) == [A, C]
    assert usable(lenders) == [C]
    lenders.know((A, C), make)
    assert lenders.links[0] is first
    assert usable(lenders) == [A, C]
    # A slab is being placed: somebody may be about to ask it.
    lenders.searches.add(0)
    lenders.know((A,), make)
    assert known(lenders) == [A, C]
    lenders.searches.clear()
    lenders.know((A,), make)
    assert known(lenders) == [A]


def test_a_new_donor_wakes_the_mapper_and_a_known_one_does_not() -> None:
    wake = asyncio.Event()
    lenders = Lenders(cast(Any, None), Alarms(), wake)
    lenders.know((A,), make)
    assert wake.is_set()
    wake.clear()
    lenders.know((A,), make)
    assert not wake.is_set()


def test_more_donors_than_an_engine_has_places_for_are_known_and_64_are_used(
    lenders: Lenders,
) -> None:
    lenders.know([HostPort("10.0.0.1", port) for port in range(1, 101)], make)
    assert len(lenders.usable()) == 100
    for number, link in enumerate(lenders.links[:64]):
        cast(Any, link).remote = number
    assert lenders.usable() == lenders.links[:64]


@pytest.mark.parametrize("ending", ["it takes a slab", "it is forgotten"])
async def test_the_alarm_of_a_distrusted_donor_is_its_own_and_ends(ending: str) -> None:
    alarms = Alarms()
    lenders = Lenders(cast(Any, None), alarms, asyncio.Event())
    lenders.know((A, B), make)
    liar, other = lenders.links
    for link in (liar, other):
        lenders.distrusted(link, "its replies break the protocol")
    assert (
        alarms[f"donor {A}"] == f"donor {A} was given up for 10 s: its replies break the protocol"
    )
    now_s = asyncio.get_running_loop().time()
    assert lenders.backoff.eligible(lenders.links, now_s) == []
    lenders.distrusted(liar, "again")
    assert "for 20 s: again" in alarms[f"donor {A}"]
    if ending == "it takes a slab":
        lenders.took(liar)
    else:
        lenders.know((B,), make)
    assert list(alarms) == [f"donor {B}"]
