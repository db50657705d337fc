# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.reach: to a donor by its address or its name, whichever works."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infiniswap.control.channel import LOST, Ended
from infiniswap.device.donors import reach as module
from infiniswap.device.donors.lease import HeldLease
from infiniswap.device.donors.reach import reach
from infiniswap.errors import NoDonorError

OURS, OTHER = "ef" * 16, "01" * 16
LEASE = HeldLease(7, "", 1, 1, OURS, peer="10.0.0.2")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_START_S", 0.01)


class Session:
    """What somebody has answered; its end is told to whom it was opened for."""

    def __init__(self, incarnation: str, handler: Any) -> None:
        self.welcome = SimpleNamespace(incarnation=incarnation, draining=True)
        self.ended: Ended | None = None
        self.handler = handler
        self.is_closed = False
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def close(self) -> None:
        await self.may_close.wait()
        self.is_closed = True
        self.lose()

    def lose(self) -> None:
        if self.ended is None:
            self.ended = Ended(LOST, "", by_peer=False)
            self.handler.ended(self.ended)


class Net:
    """Where ways lead: an incarnation, "refused" or "hangs", each time the next one, then the last.

    Attributes:
        dialled: "address" or "name", in order.
        sessions: every one that was opened.
        ends: of sessions, as the handler has heard.
        drains: likewise.
    """

    def __init__(self, address: list[str], name: list[str]) -> None:
        self._ways = {LEASE.peer: address, "": name}
        self.dialled: list[str] = []
        self.sessions: list[Session] = []
        self.ends = 0
        self.drains: list[bool] = []
        self.under_way = 0

    async def dial(self, handler: Any, *, peer: str = "") -> Any:
        self.dialled.append("address" if peer else "name")
        way = self._ways[peer]
        answer = way.pop(0) if len(way) > 1 else way[0]
        self.under_way += 1
        try:
            await (asyncio.Event().wait() if answer == "hangs" else asyncio.sleep(0))
        finally:
            self.under_way -= 1
        if answer == "refused":
            raise NoDonorError("by address" if peer else "by name")
        self.sessions.append(Session(answer, handler))
        return self.sessions[-1]

    def ended(self, ended: Ended) -> None:
        self.ends += 1

    def draining(self, draining: bool) -> None:
        self.drains.append(draining)

    def reaching(self) -> asyncio.Task[Any]:
        return asyncio.create_task(reach(self.dial, cast(Any, self), "donor.example", LEASE))

    async def opened(self, count: int) -> None:
        while len(self.sessions) < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    async def reach(self, lease: HeldLease | None = LEASE, host: str = "donor.example") -> Any:
        """As a link does; what has not been returned has ended afterwards, without a word."""
        found: Any = None
        try:
            found = await asyncio.wait_for(reach(self.dial, cast(Any, self), host, lease), 30)
        finally:
            assert self.under_way == 0
            assert all(session.is_closed for session in self.sessions if session is not found)
            assert self.ends == 0
        assert self.drains == [True]
        await found.close()
        assert self.ends == 1
        return found


@pytest.mark.parametrize(
    ("address", "name", "dialled"),
    [
        ([OURS], ["hangs"], ["address"]),
        (["refused"], [OURS], ["address", "name"]),
        (["hangs"], [OURS], ["address", "name"]),
        ([OTHER], [OURS], ["address", "name"]),
        (["refused", "refused", OURS], ["hangs"], ["address", "name", "address", "address"]),
        (["hangs"], ["refused", OURS], ["address", "name", "name"]),
        ([OTHER, OURS], ["hangs"], ["address", "name", "address"]),
    ],
)
async def test_whichever_leads_there_is_taken(
    address: list[str], name: list[str], dialled: list[str]
) -> None:
    net = Net(address, name)
    found = await net.reach()
    assert found.welcome.incarnation == OURS
    assert net.dialled == dialled


async def test_a_donor_that_was_started_anew_is_one_only_by_its_name() -> None:
    net = Net([OTHER], [OTHER])
    assert (await net.reach()).welcome.incarnation == OTHER
    assert net.dialled == ["address", "name"]


@pytest.mark.parametrize("address", ["refused", OTHER])
async def test_where_neither_leads_there_the_name_says_why(address: str) -> None:
    with pytest.raises(NoDonorError, match="by name"):
        await Net([address], ["refused"]).reach()


async def test_who_waits_no_longer_leaves_nothing_behind() -> None:
    net = Net(["hangs"], ["hangs"])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(net.reaching(), 0.1)
    assert net.dialled == ["address", "name"]
    assert net.under_way == 0


async def test_who_is_told_to_end_while_the_other_way_is_closed_leaves_nothing_behind() -> None:
    net = Net([OTHER], ["hangs"])
    reaching = net.reaching()
    await net.opened(1)
    (other,) = net.sessions
    other.may_close.clear()
    for _ in range(3):  # to begin again it has to be closed, and afterwards as well
        reaching.cancel()
        for _ in range(9):
            await asyncio.sleep(0)
        assert not reaching.done()
    other.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await reaching
    assert all(session.is_closed for session in net.sessions)
    assert net.under_way == net.ends == 0


async def test_what_the_donor_says_before_it_is_taken_is_not_lost() -> None:
    net = Net([OTHER], [OURS])
    reaching = net.reaching()
    await net.opened(1)
    net.sessions[0].may_close.clear()
    await net.opened(2)
    other, ours = net.sessions
    other.handler.draining(True)
    ours.handler.draining(False)
    other.may_close.set()
    assert await reaching is ours
    assert net.drains == [False]
    ours.handler.draining(True)
    assert net.drains == [False, True]


async def test_a_session_that_has_ended_leads_nowhere() -> None:
    net = Net(["hangs"], [OURS])
    reaching = net.reaching()
    await net.opened(1)
    net.sessions[0].lose()
    found = await reaching
    assert net.sessions == [net.sessions[0], found]
    assert found.ended is None
    assert net.ends == 0


async def test_it_ends_where_both_ways_fail_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_FOR_S", 0.2)
    net = Net([OTHER], [OTHER])

    async def dial(handler: Any, *, peer: str = "") -> Any:
        """Fails once the other way has been tried after it, or when nobody tries any more."""
        way, other = ("address", "name") if peer else ("name", "address")
        net.dialled.append(way)
        before = net.dialled.count(other)
        for _ in range(100):
            await asyncio.sleep(0.005)
            if net.dialled.count(other) > before:
                break
        raise NoDonorError(f"by {way}")

    with pytest.raises(NoDonorError, match="by name"):
        await asyncio.wait_for(reach(dial, cast(Any, net), "donor.example", LEASE), 30)
    assert net.dialled.count("address") > 1 < net.dialled.count("name")


@pytest.mark.parametrize(
    ("lease", "host"),
    [
        (None, "donor.example"),
        (LEASE, LEASE.peer),
        (HeldLease(7, "", 1, 1, OURS), "donor.example"),
    ],
)
async def test_with_one_way_only_it_is_the_only_one(lease: HeldLease | None, host: str) -> None:
    net = Net(["refused"], [OTHER])
    assert (await net.reach(lease, host)).welcome.incarnation == OTHER
    assert net.dialled == ["name"]
