# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.transports: RDMA where both ends can, else TCP with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.donors.rdma_end import END
from support.machine.at_once import at_once

from infiniswap.config import TRANSPORT_NAMES
from infiniswap.control import messages as m
from infiniswap.device.donors.lease import HeldLease, Place
from infiniswap.device.donors.transports import TRANSPORTS, allowed
from infiniswap.device.donors.transports.base import Target, Transport
from infiniswap.device.donors.transports.choice import TransportChoice
from infiniswap.device.donors.transports.rdma import Rdma, let_go
from infiniswap.device.donors.transports.tcp import Tcp
from infiniswap.engine.protocol import RemoteConfig
from infiniswap.errors import (
    DeadlineError,
    EngineError,
    RequestRefusedError,
    SessionLostError,
    UnavailableError,
)
from infiniswap.rdma_address import RdmaEnd, RdmaKey
from infiniswap.units import MIB, HostPort

KEY = RdmaKey(4096, 5)
LEASE = HeldLease(7, "0" * 32, 1, 4 * MIB, "2" * 32)
CONFIG = RemoteConfig(host="127.0.0.1", port=1, tickets=(), export_bytes=4 * MIB, queues=2)


@dataclass
class Offer:
    ends: tuple[RdmaEnd, ...] = (END, END)
    is_closed: bool = False

    def answered(self, ends: object, probe: object) -> Any:
        return self

    def close(self) -> None:
        self.is_closed = True


@dataclass
class World:
    """Both ends of connections; an error that is set is raised."""

    here: Exception | None = None
    there: Exception | None = None
    dial_error: Exception | None = None
    offered: bool = True
    answered_ends: int = 2
    slots: list[m.SlotKey] = field(default_factory=list)
    offer: Offer = field(default_factory=Offer)
    dialled: list[str] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    ended: object = None
    numbers: list[range] = field(default_factory=list)
    """Of the connections for which tickets were asked for."""
    thieves: int = 0
    """How many tickets somebody else uses first."""

    # As a session.
    address = HostPort("127.0.0.1", 1)

    @property
    def welcome(self) -> Any:
        return SimpleNamespace(rdma=self.offered, slab_bytes=MIB)

    async def rdma(self, lease: int, ends: Sequence[RdmaEnd]) -> m.RdmaAnswer:
        self.asked.append(len(ends))
        if self.there is not None:
            raise self.there
        return m.RdmaAnswer(
            id=0, ends=[END] * min(len(ends), self.answered_ends), probe=KEY, slots=self.slots
        )

    async def tickets(self, lease: int, first: int, count: int) -> list[str]:
        self.numbers.append(range(first, first + count))
        return [f"{len(self.numbers):032x}"] * count

    # As an engine, and its RDMA.
    def offer_made(self, host: str, queues: int, slots: int) -> Offer:
        assert (host, queues, slots) == ("127.0.0.1", 2, 4)
        if self.here is not None:
            raise self.here
        return self.offer

    def slot_key(self, remote: int, slot: int, key: RdmaKey) -> None:
        self.keys.append((slot, key.rkey))

    def remote_connect(self, config: RemoteConfig) -> int:
        return self.dial(config)

    def remote_destroy(self, remote: int) -> None:
        self.left.append(remote)

    def dial(self, config: RemoteConfig) -> int:
        self.dialled.append("tcp" if config.over is None else "rdma")
        assert len(config.tickets) == (config.queues if config.over is None else 1)
        if self.thieves:
            self.thieves -= 1
            raise EngineError("the ticket was used", code=errno.ENOENT)
        if config.over is not None and self.dial_error is not None:
            raise self.dial_error
        return 3

    def choice(
        self, wish: str = "auto", blocking: Any = None, more: Sequence[Transport] = ()
    ) -> TransportChoice:
        engine, blocking = cast(Any, self), blocking or at_once
        rdma = cast(Any, SimpleNamespace(offer=self.offer_made, slot_key=self.slot_key))
        both: tuple[Transport, ...] = (
            Rdma(engine, blocking, lambda _: rdma),
            Tcp(engine, blocking),
        )
        usable = [transport for transport in both if type(transport) in allowed(wish)]
        usable[1:1] = more
        return TransportChoice(usable, HostPort("127.0.0.1", 1), engine, blocking)

    def target(self, *places: Place) -> Target:
        return Target(cast(Any, self), LEASE, CONFIG, frozenset(places))

    async def connect(self, choice: TransportChoice, *places: Place) -> int:
        return await choice.connect(self.target(*places), self.dial)

    async def probe(self, choice: TransportChoice, *places: Place) -> bool:
        return await choice.probe(self.target(*places))


async def test_rdma_where_both_ends_can() -> None:
    world = World(slots=[m.SlotKey(2, 9, KEY)])
    choice = world.choice()
    assert await world.connect(choice, Place(2, 9)) == 3
    assert (choice.name, choice.reason, choice.fallbacks) == ("rdma", "", 0)
    assert world.dialled == ["rdma"]
    assert world.keys == [(2, 5)]
    choice.mapped(3, m.MapAnswer(id=0, slot=1, generation=4, key=RdmaKey(8192, 6)))
    assert world.keys[-1] == (1, 6)
    # A slab without a key could be written nowhere.
    with pytest.raises(EngineError, match="no key"):
        choice.mapped(3, m.MapAnswer(id=0, slot=1, generation=4))


async def test_nothing_is_tried_where_only_tcp_is_allowed() -> None:
    world = World()
    choice = world.choice("tcp")
    await world.connect(choice)
    assert (choice.name, choice.reason, choice.fallbacks) == ("tcp", "", 0)
    assert world.asked == []
    choice.mapped(3, m.MapAnswer(id=0, slot=1, generation=4))
    assert world.keys == []


def no_rdma(text: str) -> EngineError:
    return EngineError(f"no RDMA: {text}", code=errno.ENODEV)


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(offered=False), "the donor does not offer RDMA"),
        (World(here=no_rdma("no device")), "here: no device"),
        (
            World(there=RequestRefusedError("no RDMA: its port is down", reason=m.REFUSED_NO_RDMA)),
            "at the donor: its port is down",
        ),
        (World(dial_error=EngineError("no answer over RDMA", code=110)), "no answer over RDMA"),
        (World(answered_ends=1), "the donor answered with 1 ends, not 2"),
        (World(slots=[m.SlotKey(2, 8, KEY)]), "the donor could register 0 of 1 slab of ours"),
        (
            World(slots=[m.SlotKey(2, 9, KEY), m.SlotKey(4, 10, KEY)]),
            "the donor named slot 4 of a lease of 4",
        ),
    ],
)
async def test_tcp_with_the_reason_where_rdma_cannot_be(world: World, reason: str) -> None:
    choice = world.choice()
    assert await world.connect(choice, *([Place(2, 9)] if world.slots else [])) == 3
    assert (choice.name, choice.reason, choice.fallbacks) == ("tcp", reason, 1)
    assert world.dialled == (["rdma", "tcp"] if world.dial_error else ["tcp"])
    # What was begun is ended, at both ends.
    assert world.offer.is_closed == (world.asked != [])
    if world.asked and world.there is None:
        assert world.asked == [2, 0]
    # The same wish, when it must be: an error that names a remedy, and no connection.
    world.dialled.clear()
    strict = world.choice("rdma")
    with pytest.raises(UnavailableError) as caught:
        await world.connect(strict, *([Place(2, 9)] if world.slots else []))
    assert reason in str(caught.value)
    assert "doctor" in str(caught.value)
    assert (strict.name, strict.reason, strict.fallbacks) == ("", reason, 0)
    assert "tcp" not in world.dialled


async def test_an_offer_that_nobody_waits_for_any_more_is_closed() -> None:
    async def told_to_end(call: Callable[[], Any]) -> Any:
        call()
        raise asyncio.CancelledError

    world = World()
    choice = world.choice("auto", told_to_end)
    with pytest.raises(asyncio.CancelledError):
        await world.connect(choice)
    assert world.offer.is_closed
    assert world.asked == []


async def test_a_lost_session_is_no_reason_for_tcp() -> None:
    world = World(there=SessionLostError("gone"))
    with pytest.raises(SessionLostError):
        await world.connect(world.choice())
    assert world.dialled == []
    assert world.offer.is_closed
    stale = World(there=RequestRefusedError("no such lease", reason=m.REFUSED_UNKNOWN_LEASE))
    with pytest.raises(RequestRefusedError):
        await stale.connect(stale.choice())
    assert stale.dialled == []


async def test_rdma_that_breaks_at_once_is_left_alone_for_a_while() -> None:
    world = World()
    choice = world.choice()
    for _ in range(2):
        await world.connect(choice)
        assert choice.name == "rdma"
        choice.lost()
    await world.connect(choice)
    assert choice.name == "tcp"
    assert "again and again" in choice.reason
    # Nor is it looked for meanwhile.
    world.asked.clear()
    assert not await world.probe(choice)
    assert (world.asked, choice.probes) == ([], 0)
    # Who wants nothing else gets nothing else.
    strict = world.choice("rdma")
    for _ in range(4):
        await world.connect(strict)
        strict.lost()
    assert strict.name == "rdma"


async def test_a_transport_between_is_taken_until_the_best_can_be() -> None:
    class Between(Tcp):
        name, label = "between", "BETWEEN"

    world = World(here=no_rdma("no device"))
    engine = cast(Any, world)
    choice = world.choice(more=[Between(engine, at_once)])
    await world.connect(choice)
    assert (choice.name, choice.reason) == ("between", "here: no device")
    assert not await world.probe(choice)
    world.here = None
    assert await world.probe(choice)
    assert world.left == [3]
    await world.connect(choice)
    assert not choice.misses_better


async def test_a_probe_leaves_nothing_and_changes_nothing() -> None:
    world = World(here=no_rdma("its port is down"), slots=[m.SlotKey(2, 9, KEY)])
    choice = world.choice()
    misses = [choice.misses_better]
    await world.connect(choice)
    assert [*misses, choice.misses_better] == [False, True]
    world.here = None
    world.dial_error = EngineError("no answer over RDMA", code=110)
    assert not await world.probe(choice)
    assert (choice.name, choice.reason, choice.fallbacks) == ("tcp", "no answer over RDMA", 1)
    assert world.asked == [2, 0]
    # Nor does it at the donor where another error ended it; but one that refused has nothing.
    world.dial_error = None
    world.there = DeadlineError("no answer")
    with pytest.raises(DeadlineError):
        await world.probe(choice)
    assert world.asked == [2, 0, 2, 0]
    world.ended = "by us"
    with pytest.raises(DeadlineError):
        await world.probe(choice)
    assert world.asked == [2, 0, 2, 0, 2]
    world.ended = None
    world.there = RequestRefusedError("no device", reason=m.REFUSED_NO_RDMA)
    assert not await world.probe(choice)
    assert world.asked == [2, 0, 2, 0, 2, 2]
    world.there = None
    world.offer = Offer()
    assert not await world.probe(choice, Place(3, 9))
    assert "0 of 1 slab of ours" in choice.reason
    assert await world.probe(choice, Place(2, 9))
    assert world.offer.is_closed
    # The connection that was made for it, and nothing else: keys are told when it is for good.
    assert world.left == [3]
    assert world.keys == []
    assert choice.name == "tcp"
    await world.connect(choice, Place(2, 9))
    assert (choice.name, choice.misses_better) == ("rdma", False)
    assert (choice.reason, choice.fallbacks) == ("", 1)
    # What waited for its turn meanwhile would end these.
    world.asked.clear()
    assert not await world.probe(choice, Place(2, 9))
    assert (world.asked, choice.probes) == ([], 6)


async def test_a_device_that_is_removed_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = [0, None, 1, 0, 0]

    def let_go_of() -> int:
        answer = answers.pop(0)
        if answer is None:
            raise EngineError("the engine is closed", code=9)
        return answer

    async def sleep(pause_s: float) -> None:
        assert pause_s > 0
        if not answers:
            raise asyncio.CancelledError

    with contextlib.suppress(asyncio.CancelledError):
        await let_go(cast(Any, SimpleNamespace(let_go=let_go_of)), at_once, lambda: True, sleep)
    assert not answers
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "being removed" in caplog.text


async def test_a_device_that_uses_no_rdma_looks_for_none() -> None:
    looks = 0

    async def sleep(_pause_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 60:
            raise asyncio.CancelledError

    def let_go_of() -> int:
        raise AssertionError("nothing to let go of")

    rdma = cast(Any, SimpleNamespace(let_go=let_go_of))
    with pytest.raises(asyncio.CancelledError):
        await let_go(rdma, at_once, lambda: False, sleep)
    assert looks == 60


def test_the_configuration_names_every_transport() -> None:
    assert tuple(kind.name for kind in TRANSPORTS) == TRANSPORT_NAMES


async def test_each_connection_has_a_ticket_and_a_trial_takes_no_number_in_use() -> None:
    world = World()
    choice = world.choice()
    assert await world.connect(choice) == 3
    world.dial_error = EngineError("refused")
    await world.connect(choice)
    assert world.numbers == [range(1), range(1), range(2)]
    world.dial_error = None
    assert await world.probe(choice)
    assert world.numbers[-1] == range(16, 17)


async def test_a_ticket_that_somebody_else_used_is_replaced_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(thieves=1)
    assert await world.connect(world.choice("tcp")) == 3
    assert world.numbers == [range(2), range(2)]
    assert "new tickets end their connections" in caplog.text
    world.thieves = 2
    with pytest.raises(EngineError):
        await world.connect(world.choice("tcp"))
    assert len(world.numbers) == 4
