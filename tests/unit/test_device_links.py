# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.link: slabs that leave a donor, and the way back after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import ECONNRESET
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.donors.refusals import refused

from infiniswap.config import DeviceConfig
from infiniswap.control.messages import (
    REFUSED_BUSY,
    REFUSED_ONLY_COPY,
    REFUSED_STALE,
    REFUSED_UNKNOWN_LEASE,
    MemoryAnswer,
)
from infiniswap.device.donors import mapped, recovery
from infiniswap.device.donors.lease import HeldLease, Place
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import LinkConfig
from infiniswap.engine.protocol import RemoteConfig, RemoteInfo
from infiniswap.errors import (
    DeadlineError,
    NoDonorError,
    RequestRefusedError,
    SessionLostError,
)
from infiniswap.units import MIB, HostPort

PLACE = Place(3, 9)


class Session:
    """With a donor that answers; a name in `refusals` refuses one request."""

    peer = ""
    data_address = HostPort("127.0.0.1", 2)

    def __init__(self, *refusals: str) -> None:
        self.welcome = SimpleNamespace(maps_ahead=False, incarnation="", donor_name="one")
        self.ended: str | None = None
        self.unmapped: list[tuple[int, int, int]] = []
        self.refusals = list(refusals)
        self.lost = asyncio.Event()
        self.is_watched = self.is_late = False
        self.leases: list[tuple[int, int]] = []
        self.address = self.data_address = HostPort("127.0.0.1", 1)
        self.peer = ""

    def _may_refuse(self) -> None:
        if self.refusals and (reason := self.refusals.pop(0)):
            raise RequestRefusedError("no", reason=reason)

    async def memory(self) -> Any:
        return MemoryAnswer(id=0, used_share=0.1, free_slabs=5, can_map=9)

    async def renew(self, lease: int, reclaim: str, epoch: int) -> Any:
        self._may_refuse()
        slot = SimpleNamespace(slot=PLACE.slot, generation=PLACE.generation)
        return SimpleNamespace(epoch=epoch + 1, slots=[slot])

    async def lease(self, slots_max: int, connections: int) -> Any:
        self.leases.append((slots_max, connections))
        if self.is_late:
            raise DeadlineError("no answer")
        size_bytes = slots_max * DeviceConfig().slab_bytes
        return SimpleNamespace(lease=8, reclaim="", epoch=1, export_bytes=size_bytes)

    async def map(self, lease: int, slab: int, *, ahead: bool) -> Any:
        return SimpleNamespace(slot=0, generation=1, key=None)

    async def tickets(self, lease: int, first: int, count: int) -> list[str]:
        return ["f" * 32, "e" * 32][:count] if self.leases else ["0" * 32] * count

    async def unmap(self, lease: int, slot: int, generation: int) -> None:
        self._may_refuse()
        self.unmapped.append((lease, slot, generation))

    async def release(self, lease: int) -> None:
        self.ended = "released"

    async def wait_ended(self) -> None:
        self.is_watched = True
        await self.lost.wait()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self.ended = "done"


class Engine:
    """One remote, with slab 0, which has requests in flight unless `is_at_rest`."""

    state = "up"
    is_at_rest = False
    only_there = 0

    def __init__(self) -> None:
        self.connected: list[tuple[str, ...]] = []

    def remote_connect(self, config: RemoteConfig) -> int:
        self.connected.append(config.tickets)
        return 0

    def remotes(self) -> list[RemoteInfo]:
        return [RemoteInfo(0, self.state, 1, {}, 0)]

    def remote_reconnect(self, remote: int, config: object) -> None:
        self.state = "up"

    def slab_pages_at(self, slab: int, remote: int, generation: int) -> tuple[int, bool]:
        return self.only_there, False

    def slab(self, slab: int) -> Any:
        return SimpleNamespace(is_at=lambda remote, generation: not self.is_at_rest)

    def _ignore(self, *args: object) -> None:
        pass

    remote_shutdown = remote_destroy = remote_record_set = slab_unmap = slab_resume = _ignore
    slab_map = _ignore


class Keeper:
    """Remembers what it was told. `end` is that of every drain."""

    def __init__(self, *, drained: bool = False, moves: bool = False) -> None:
        self.end = asyncio.get_running_loop().create_future()
        self.evictions: list[int] = []
        self.losses: list[int] = []
        self.lost_pages: list[tuple[int, str]] = []
        self.distrust: list[str] = []
        self.moves = moves
        if drained:
            self.end.set_result(None)

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        return self.end

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        return self.moves

    def evicted(self, link: DonorLink, slab: int) -> None:
        self.evictions.append(slab)

    def pages_lost(self, pages: int, why: str) -> None:
        self.lost_pages.append((pages, why))

    def lost(self, slab: int) -> None:
        self.losses.append(slab)

    def distrusted(self, link: DonorLink, why: str) -> None:
        self.distrust.append(f"given up: {why}")

    def avoided(self, link: DonorLink, why: str) -> None:
        self.distrust.append(f"kept: {why}")

    def arrived(self, slab: int) -> None:
        pass


Make = Callable[..., DonorLink]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a link that has lease 7 and slab 0 in slot 3 there; without a backup unless told."""
    with ThreadPoolExecutor(1) as executor:

        def make(
            session: Any,
            keeper: Keeper | None = None,
            engine: Engine | None = None,
            *,
            suspend_s: float = 60.0,
            has_backup: bool = False,
        ) -> DonorLink:
            nothing = cast(Any, None)
            device = DeviceConfig(transport="tcp")
            config = LinkConfig(nothing, nothing, device, suspend_s, 1, has_backup=has_backup)
            ends = cast(Any, engine or Engine()), cast(Any, keeper or Keeper())
            link = DonorLink(HostPort("127.0.0.1", 1), *ends, config, executor)
            link.session.current = session
            link.connections.lease = HeldLease(7, "", 1, MIB, "")
            link.connections.remote = 0
            link.mapped[0] = PLACE
            return link

        yield make


async def test_an_older_donor_is_never_asked_to_map_ahead(make: Make) -> None:
    """It would not know what that is, and evict somebody else's slab for it."""
    session = Session()
    link = make(session)
    assert (await link.ask()).slabs_mappable == 9
    assert (await link.ask(ahead=True)).slabs_mappable == 0
    with pytest.raises(NoDonorError, match="ahead"):
        await link.map(1, ahead=True)
    session.welcome.maps_ahead = True
    assert (await link.ask(ahead=True)).slabs_mappable == 5  # free ones only


@pytest.mark.parametrize("refusal", ["", REFUSED_STALE, REFUSED_BUSY])
async def test_a_slab_that_was_refused_and_then_given_up_is_unmapped_explicitly(
    make: Make, refusal: str
) -> None:
    """The donor no longer waits for the EVICT that was refused: told twice, its DONE is lost."""
    session, keeper = Session(refusal), Keeper(drained=True)
    link = make(session, keeper)
    with refused(REFUSED_ONLY_COPY):
        await link.evict(7, 3, 9, 2.0, 1.0)
    assert link.mapped == {0: PLACE}
    await link.evict(8, 3, 9, 1.0, 0.0)  # another lease's: nothing to give up
    keeper.moves = True
    await link.evict(7, 3, 9, 2.0, 1.0)
    assert not link.mapped
    assert session.unmapped == ([] if refusal else [(7, 3, 9)])
    # A donor that is too busy to hear it is told by the renewal.
    assert (session.ended is not None) == (refusal == REFUSED_BUSY)


async def test_only_copies_that_a_donor_takes_are_lost_and_said(make: Make) -> None:
    """By `drain --force`, or for its host: to refuse would only make it cut the connections."""
    keeper, engine = Keeper(drained=True), Engine()
    engine.only_there = 5
    link = make(Session(), keeper, engine)
    await link.evict(7, 3, 9, 1.0, 0.0, last_copy=True)
    assert not link.mapped
    assert keeper.evictions == [0]
    said = "to donor 127.0.0.1:1, which took back slabs with the only copies"
    assert keeper.lost_pages == [(5, said)]


async def test_done_alone_gives_a_slab_up_that_the_donor_waits_for(make: Make) -> None:
    session = Session()
    link = make(session, Keeper(drained=True, moves=True))
    await link.evict(7, 3, 9, 2.0, 1.0)
    assert not link.mapped
    assert not session.unmapped


async def test_a_slab_at_rest_is_given_up_before_the_engine_reports_it(make: Make) -> None:
    session, engine, keeper = Session(), Engine(), Keeper()
    engine.is_at_rest = True
    link = make(session, keeper, engine, has_backup=True)
    await link.evict(7, 3, 9, 1.0, 0.0)
    assert (link.mapped, keeper.evictions) == ({}, [0])
    assert not keeper.end.done()
    assert not session.is_watched  # as there is no time to move the slab


async def test_a_lease_comes_with_tickets_for_all_connections(make: Make) -> None:
    session, engine = Session(), Engine()
    link = make(session, engine=engine)
    link.connections.lease = link.connections.remote = None
    await link.map(1)
    assert session.leases == [(1 + 16, 2)]
    assert engine.connected == [("f" * 32, "e" * 32)]


async def test_a_lease_that_comes_too_late_ends_with_its_session(make: Make) -> None:
    """Nobody would know it, and a donor grants a session only so many."""
    session = Session()
    session.is_late = True
    link = make(session)
    link.connections.lease = link.connections.remote = None
    with pytest.raises(DeadlineError):
        await link.map(1)
    assert session.ended is not None
    assert link.connections.lease is None


@pytest.mark.parametrize("incarnation", ["", "another"])
async def test_a_slab_whose_drain_ends_when_nobody_waits_is_given_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, incarnation: str
) -> None:
    """As after a host was suspended. A lease that is gone has no slab to give back."""
    monkeypatch.setattr(mapped, "_DRAIN_S_MAX", 0.0)
    session, keeper = Session(), Keeper()
    link = make(session, keeper)
    with pytest.raises(TimeoutError):
        await link.unmap(0, "refused")
    assert link.mapped
    link.connections.lease = HeldLease(7, "", 2, MIB, incarnation)
    keeper.end.set_result(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not link.mapped
    assert session.unmapped == ([] if incarnation else [(7, 3, 9)])


async def test_a_drain_that_a_recovery_does_not_see_the_end_of_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no fault of ours: a host that was suspended for long sees its deadline pass."""
    monkeypatch.setattr(mapped, "_DRAIN_S_MAX", 0.0)
    monkeypatch.setattr(recovery, "_RETRY_S_MAX", 0.0)
    keeper, engine = Keeper(), Engine()
    link = make(Session(), keeper, engine, suspend_s=-1.0)
    engine.state = "down"
    link.connections_down(-ECONNRESET)
    await link.settled()
    assert link.state == "suspended"
    keeper.end.set_result(None)
    await asyncio.wait_for(link.settled(), 60)
    assert link.state == "idle"
    texts = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "not recovered yet: slab 0 has requests in flight" in texts[1]
    assert "given up" in texts[-1]
    assert {record.levelname for record in caplog.records} <= {"INFO", "WARNING"}
    assert keeper.losses == [0]


async def test_an_eviction_does_not_outlive_its_session(make: Make) -> None:
    """Whoever recovers the session waits for it, and the slab moves on all the same."""

    class Moving(Keeper):
        cancelled = False

        async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            return True

    session, keeper = Session(), Moving()
    link = make(session, keeper)
    asyncio.get_running_loop().call_later(0.05, session.lost.set)
    with pytest.raises(SessionLostError):
        await asyncio.wait_for(link.evict(7, 3, 9, 900.0, 800.0), 60)
    assert keeper.cancelled
    assert link.mapped  # it moves on; at its end it is given back


async def test_a_slab_evicted_past_the_deadline_is_not_the_donors_for_good(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, engine = Keeper(), Engine()
    link = make(Session(), keeper, engine, has_backup=True)
    with pytest.raises(TimeoutError):
        await link.evict(7, 3, 9, 0.0, 0.0)
    assert keeper.evictions == [0]  # the donor takes it anyway: another one is looked for
    assert link.mapped  # requests are in flight there
    # That costs the connections, once, which does not count against the transport either.
    lost: list[int] = []
    monkeypatch.setattr(link.connections.transport, "lost", lambda: lost.append(len(lost)))
    for count in (0, 1):
        engine.state = "down"
        link.connections_down(-ECONNRESET)
        assert len(lost) == count
        await link.settled()
    keeper.end.set_result(None)
    await asyncio.sleep(0)
    assert not link.mapped


async def test_a_donor_that_is_busy_is_asked_for_the_lease_once_more(make: Make) -> None:
    session = Session(REFUSED_BUSY, REFUSED_BUSY, "", REFUSED_UNKNOWN_LEASE, "")
    engine = Engine()
    link = make(session, Keeper(drained=True), engine)
    for reclaimed in (1, 0):
        engine.state = "down"
        link.connections_down(-ECONNRESET)
        await asyncio.wait_for(link.settled(), 60)
        assert link.connections.counts.given_up == 1 - reclaimed
    assert link.connections.counts.reclaimed == 1
    assert session.refusals == [""]
    assert "lease gone" in link.detail


@pytest.mark.parametrize("has_backup", [False, True])
async def test_bad_pages_expel_a_donor_only_where_there_are_other_copies(
    make: Make, has_backup: bool
) -> None:
    """Who changes bits on the way could make any donor look bad, and all of them in turn."""
    shut_down: list[int] = []
    engine, keeper = Engine(), Keeper(drained=True)
    cast(Any, engine).remote_shutdown = shut_down.append
    link = make(Session(), keeper, engine, has_backup=has_backup)
    for page in range(15):
        link.bad_page(page)
    assert not keeper.distrust
    link.bad_page(15)
    what = "given up" if has_backup else "kept"
    assert keeper.distrust == [f"{what}: 16 pages came back with other bytes"]
    assert shut_down == ([0] if has_backup else [])
    assert link.mapped == {0: PLACE}
    assert link.state == "mapped"
    if not has_backup:  # counted anew
        for page in range(16):
            link.bad_page(page)
        assert len(keeper.distrust) == 2
        assert link.is_usable
