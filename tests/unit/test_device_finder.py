# SPDX-License-Identifier: Apache-2.0
"""The donors that a device knows: named, listed in a file, announced; and how many it asks."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from infiniswap.device.slabs.finder import Finder
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.policy.activity import ActivityConfig
from infiniswap.policy.placement import MemoryUse
from infiniswap.units import HostPort

A, B, C = (HostPort(f"10.0.0.{number}", 9400) for number in (1, 2, 3))
NOTHING = cast(Any, None)


def a_mapper(slabs: int = 1) -> SlabMapper:
    """One that has no engine."""
    activity = ActivityConfig(1.0, 1.0, 1.0)
    return SlabMapper(NOTHING, slabs, activity, 2, Random(1), 0.0, NOTHING, 1)


def spec(*donors: HostPort, **sources: Any) -> Any:
    """What a device looks for donors by."""
    return SimpleNamespace(**{"donors": donors, "peers_file": None, "mqtt": None, **sources})


class Link:
    """A donor that counts how often it is asked."""

    asked = 0

    def __init__(self, address: HostPort) -> None:
        self.address = address
        self.is_listed = self.is_usable = self.is_idle = True
        self.remote: int | None = None
        self.detail = ""
        self.mapped: dict[int, int] = {}

    async def ask(self, *, ahead: bool) -> MemoryUse:
        Link.asked += 1
        return MemoryUse(0.5, 4)

    async def map(self, slab: int, *, migrates: bool, ahead: bool) -> None:
        self.mapped[slab] = 0

    async def let_go(self) -> None: ...


async def test_a_hundred_announced_donors_cost_two_queries_a_slab() -> None:
    mapper = a_mapper(16)
    mapper.know([HostPort("10.0.0.1", port) for port in range(1, 101)], cast(Any, Link))
    Link.asked = 0
    for slab in range(16):
        assert await mapper.place(slab)
        assert Link.asked == 2 * (slab + 1)


class Watched:
    """What a process that listens has told."""

    def __init__(self, spec: Any, changed: Any) -> None:
        self.donors: tuple[HostPort, ...] = ()
        self.has_heard = False
        self.problem, self.notes = "", list[str]()

    def start(self) -> None: ...


def test_a_successor_that_has_heard_nobody_yet_keeps_the_donors_it_took_over() -> None:
    found_by = spec(mqtt=1)
    mapper = a_mapper()
    found = Finder(found_by, NOTHING, cast(Any, Watched))
    taken_over, newcomer = HostPort("10.0.0.1", 1), HostPort("10.0.0.2", 1)
    mapper.links = [cast(Any, Link(taken_over))]
    found._know(mapper, cast(Any, Link))
    assert [link.address for link in mapper.lenders()] == [taken_over]
    watched = cast(Any, found._watcher)
    watched.donors, watched.has_heard = (newcomer,), True
    found._know(mapper, cast(Any, Link))
    assert [link.address for link in mapper.lenders()] == [newcomer]


async def test_donors_that_are_named_and_announced_are_used_together(tmp_path: Path) -> None:
    named, listed, both, announced = (HostPort(f"10.0.0.{number}", 1) for number in range(1, 5))
    peers = tmp_path / "peers"
    peers.write_text(f"{listed}\n{both}\n")
    found_by = spec(named, peers_file=str(peers), mqtt=1)
    mapper = a_mapper()
    found = Finder(found_by, NOTHING, cast(Any, Watched))

    def lenders() -> list[HostPort]:
        return [link.address for link in mapper.lenders()]

    await found.begin()  # waits for no broker: somebody is named
    found.start(found_by, mapper, cast(Any, Link))
    assert lenders() == [named, listed, both]
    watched = cast(Any, found._watcher)
    watched.donors, watched.has_heard = (both, announced), True
    found._know(mapper, cast(Any, Link))
    assert lenders() == [named, listed, both, announced]
    assert found.announced() == (announced,)
    # What one source takes back another one may still say.
    watched.donors = (announced,)
    found.tell(spec(peers_file=str(peers), mqtt=1), mapper, cast(Any, Link))
    assert lenders() == [listed, both, announced]
    watched.donors = ()
    found._know(mapper, cast(Any, Link))
    assert lenders() == [listed, both]


def test_a_successor_goes_by_those_that_are_named_now() -> None:
    """It was made when others were, and waited for its turn."""
    first, second = HostPort("10.0.0.1", 1), HostPort("10.0.0.2", 1)
    before, now = spec(first), spec(second)
    mapper = a_mapper()
    Finder(before, NOTHING).start(now, mapper, cast(Any, Link))
    assert [link.address for link in mapper.lenders()] == [second]


def test_who_is_not_listed_any_more_keeps_what_it_has_and_gets_NOTHING_more() -> None:
    mapper = a_mapper()
    make = cast(Any, Link)
    mapper.know((A, B, A), make)
    assert [link.address for link in mapper.links] == [A, B]
    first = cast(Any, mapper.links[0])
    first.is_idle, first.remote = False, 7
    mapper.know((C,), make)
    assert [link.address for link in mapper.links] == [A, C]
    assert [link.address for link in mapper.lenders()] == [C]
    mapper.know((A, C), make)
    assert mapper.links[0] is first
    assert [link.address for link in mapper.lenders()] == [A, C]
    # A slab is being placed: somebody may be about to ask it.
    mapper._placing.add(0)
    mapper.know((A,), make)
    assert [link.address for link in mapper.links] == [A, C]
    mapper._placing.clear()
    mapper.know((A,), make)
    assert [link.address for link in mapper.links] == [A]


def test_more_donors_than_an_engine_has_places_for_are_known_and_64_are_used() -> None:
    mapper = a_mapper()
    mapper.know([HostPort("10.0.0.1", port) for port in range(1, 101)], cast(Any, Link))
    assert len(mapper.lenders()) == 100
    for number, link in enumerate(mapper.links[:64]):
        link.remote = number
    assert mapper.lenders() == mapper.links[:64]
