# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.finder: donors that are named, in a file, or on a broker."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infiniswap.config import ClusterConfig, Config
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.slabs.finder import Finder
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.units import HostPort

NOTHING = cast(Any, None)
FIRST, SECOND = HostPort("10.0.0.1", 1), HostPort("10.0.0.2", 1)


def make(address: HostPort) -> Any:
    """In place of a DonorLink."""
    return SimpleNamespace(
        address=address, is_listed=True, is_usable=True, is_idle=True, remote=None
    )


class Watched:
    """What a process that listens has told."""

    def __init__(self, spec: Any, changed: Any) -> None:
        self.donors: tuple[HostPort, ...] = ()
        self.has_heard = False
        self.problem, self.notes = "", list[str]()

    def start(self) -> None: ...


@pytest.fixture
def known_donors() -> KnownDonors:
    return KnownDonors(NOTHING, Alarms(), asyncio.Event())


def spec(*donors: HostPort, mqtt: int = 0, **cluster: Any) -> Any:
    found = ClusterConfig(peers=donors, discovery="mqtt" if mqtt else "static", **cluster)
    return SimpleNamespace(config=Config(cluster=found))


def usable(known_donors: KnownDonors) -> list[HostPort]:
    return [link.address for link in known_donors.usable()]


def test_a_successor_that_has_heard_nobody_yet_keeps_the_donors_it_took_over(
    known_donors: KnownDonors,
) -> None:
    found = Finder(spec(mqtt=1), NOTHING, cast(Any, Watched))
    known_donors.links = [make(FIRST)]
    found.start(spec(mqtt=1), known_donors, make)
    assert usable(known_donors) == [FIRST]
    watched = cast(Any, found._watcher)
    watched.donors, watched.has_heard = (SECOND,), True
    found.tell(spec(mqtt=1), known_donors, make)
    assert usable(known_donors) == [SECOND]


async def test_donors_that_are_named_and_announced_are_used_together(
    tmp_path: Path, known_donors: KnownDonors
) -> None:
    named, listed, both, announced = (HostPort(f"10.0.0.{number}", 1) for number in range(1, 5))
    peers = tmp_path / "peers"
    peers.write_text(f"{listed}\n{both}\n")
    sourced = functools.partial(spec, peers_file=str(peers), mqtt=1)
    found = Finder(sourced(named), NOTHING, cast(Any, Watched))
    await found.begin()  # waits for no broker: somebody is named
    found.start(sourced(named), known_donors, make)
    assert usable(known_donors) == [named, listed, both]
    watched = cast(Any, found._watcher)
    watched.donors, watched.has_heard = (both, announced), True
    found.tell(sourced(named), known_donors, make)
    assert usable(known_donors) == [named, listed, both, announced]
    assert found.announced() == (announced,)
    # What one source takes back another one may still say.
    watched.donors = (announced,)
    found.tell(sourced(), known_donors, make)
    assert usable(known_donors) == [listed, both, announced]
    watched.donors = ()
    found.tell(sourced(), known_donors, make)
    assert usable(known_donors) == [listed, both]


def test_a_successor_goes_by_those_that_are_named_now(known_donors: KnownDonors) -> None:
    """It was made when others were, and waited for its turn."""
    Finder(spec(FIRST), NOTHING).start(spec(SECOND), known_donors, make)
    assert usable(known_donors) == [SECOND]
