# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.slabs.engine_events: what follows from what the engine reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest

from infiniswap.device.donors.lease import Place
from infiniswap.device.donors.recovery import Recovery
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.device.slabs.engine_events import EngineEvents
from infiniswap.device.slabs.known_donors import KnownDonors
from infiniswap.engine.protocol import EngineEvent, EventKind


def link_of(remote: int, slab: int) -> Mock:
    """A donor's, with that slab. What it is told its recovery takes."""
    return Mock(spec=Recovery, address="10.0.0.1", remote=remote, mapped={slab: Place(0, 7)})


class Fixture:
    """Two donors: remote 1 has slab 1, remote 2 has slab 2."""

    def __init__(self) -> None:
        self.queue: list[EngineEvent] = []
        self.drained: set[int] = set()
        self.down: set[int] = set()
        self.links = [link_of(1, 1), link_of(2, 2)]
        self.alarms = Alarms()
        self.refused: list[tuple[Any, int]] = []
        self.lost = 0
        engine = cast(Any, self)
        self.known_donors = KnownDonors(engine, self.alarms, asyncio.Event())
        self.known_donors.links = cast(Any, self.links)
        self.found = EngineEvents(
            engine, self.known_donors, self.alarms, lambda *args: self.refused.append(args)
        )
        self.found.on_connection_lost = self._connection_lost
        self.found.backup = "/b"

    def _connection_lost(self) -> None:
        self.lost += 1

    def report(self, kind: EventKind, **fields: int) -> None:
        names = ("code", "remote", "slab", "generation", "value")
        self.queue.append(EngineEvent(kind, **{name: fields.get(name, 0) for name in names}))
        self.found.take()

    def eligible(self) -> list[Any]:
        now_s = asyncio.get_running_loop().time()
        backoff = self.known_donors.backoff
        return [link for link in self.known_donors.links if backoff.is_eligible(link, now_s)]

    # ------------------------------------------------------- what is used of the engine

    def events(self) -> list[EngineEvent]:
        taken, self.queue = self.queue[:1], self.queue[1:]
        return taken

    def slabs(self) -> list[Any]:
        return [
            SimpleNamespace(is_at=lambda *_place, number=number: number not in self.drained)
            for number in range(3)
        ]

    def remotes(self) -> list[Any]:
        states = ((number, "down" if number in self.down else "up") for number in (1, 2))
        return [SimpleNamespace(remote=number, state=state) for number, state in states]


async def test_who_waits_for_a_drain_is_told_of_that_one_only() -> None:
    w = Fixture()
    first, again = (w.found.drained(1, 1, 7) for _ in range(2))
    later = w.found.drained(1, 1, 8)
    assert first is again
    w.report(EventKind.SLAB_DRAINED, slab=1, remote=1, generation=6)
    assert not first.done()
    w.report(EventKind.SLAB_DRAINED, slab=1, remote=1, generation=7)
    assert first.done()
    assert list(w.found.drains) == [(1, 1, 8)]
    later.cancel()
    w.report(EventKind.SLAB_DRAINED, slab=1, remote=1, generation=8)  # nobody waits any longer
    assert not w.found.drains


async def test_what_dropped_events_would_have_said_is_read_from_the_state() -> None:
    w = Fixture()
    ended, going_on = w.found.drained(1, 1, 7), w.found.drained(2, 2, 7)
    w.drained, w.down = {1}, {2}
    w.report(EventKind.OVERFLOW)
    assert (ended.done(), going_on.done()) == (True, False)
    assert [link.mock_calls for link in w.links] == [[], [call.connections_down(0)]]
    assert w.lost == 1


async def test_a_donor_that_is_lost_is_told_so_and_not_asked_for_a_while() -> None:
    w = Fixture()
    w.report(EventKind.REMOTE_DOWN, remote=2, code=-104)
    assert [link.mock_calls for link in w.links] == [[], [call.connections_down(-104)]]
    assert w.eligible() == w.links[:1]


@pytest.mark.parametrize(
    ("place", "is_news"),
    [
        ({"slab": 1, "remote": 1, "generation": 7}, True),
        ({"slab": 1, "remote": 1, "generation": 6}, False),
        ({"slab": 2, "remote": 1, "generation": 7}, False),
    ],
)
async def test_a_slab_that_its_donor_refuses_is_taken_off_it_unless_it_has_left(
    place: dict[str, int], is_news: bool
) -> None:
    w = Fixture()
    w.report(EventKind.SLAB_ERROR, code=-5, **place)
    assert w.refused == ([(w.links[0], 1)] if is_news else [])
    assert w.links[0].mock_calls == ([call.refused()] if is_news else [])
    assert (w.links[0] in w.eligible()) is not is_news


async def test_a_bad_page_is_held_against_its_donor_or_raises_the_alarm_of_the_disk() -> None:
    w = Fixture()
    w.report(EventKind.BAD_PAGE, slab=2, remote=2, code=1, value=99)
    w.report(EventKind.BAD_PAGE, slab=1, remote=2, code=1, value=98)  # it has left that donor
    assert [link.mock_calls for link in w.links] == [[], [call.bad_page(99)]]
    assert not w.alarms
    w.report(EventKind.BAD_PAGE, value=97)
    assert w.alarms == {"backup-data": "page 97 came back from the backup with other bytes"}


@pytest.mark.parametrize(
    ("kind", "alarms", "lost"),
    [
        (
            EventKind.BACKUP_FAILING,
            {"backup": "the backup /b refuses writes: No space left on device"},
            0,
        ),
        (EventKind.FRONTEND_DOWN, {"frontend": "the front end has ended (code -28)"}, 1),
        (EventKind.CONNECTION_LOST, {}, 1),
    ],
)
async def test_an_alarm_says_what_is_wrong_and_repairs_hear_of_the_front_end(
    kind: EventKind, alarms: dict[str, str], lost: int
) -> None:
    w = Fixture()
    w.report(kind, code=-28)
    assert (w.alarms, w.lost) == (alarms, lost)


async def test_the_alarm_of_the_backup_ends_with_its_failure() -> None:
    w = Fixture()
    w.alarms["lost-pages"] = "another"
    w.report(EventKind.BACKUP_FAILING, code=-28)
    w.report(EventKind.BACKUP_RECOVERED)
    assert list(w.alarms) == ["lost-pages"]
