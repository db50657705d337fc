# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.donors.link: what a recovery that runs out of time leaves behind."""

from __future__ import annotations

import asyncio
from errno import ECONNRESET
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infiniswap.config import DeviceConfig
from infiniswap.control.messages import (
    REFUSED_BUSY,
    REFUSED_ONLY_COPY,
    REFUSED_STALE,
    REFUSED_UNKNOWN_LEASE,
    LeaseAnswer,
    MemoryAnswer,
)
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.donors.link_types import Lease, LinkConfig, Place
from infiniswap.errors import (
    NoDonorError,
    ProtocolMismatchError,
    RequestRefusedError,
    SessionLostError,
)
from infiniswap.units import MIB, HostPort

DEVICE = DeviceConfig(transport="tcp", slab_bytes=MIB)


class Unmoved:
    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        return False


async def test_a_slab_that_is_the_only_copy_is_not_given_up() -> None:
    nothing = cast(Any, None)
    config = LinkConfig(
        identity=nothing,
        client=nothing,
        device=DEVICE,
        suspend_s=1.0,
        slab_count=1,
        has_backup=False,
    )
    link = DonorLink(HostPort("127.0.0.1", 1), nothing, cast(Any, Unmoved()), config, nothing)
    link._lease = Lease(7, "", 1, "", MIB, "")
    link.mapped = {0: Place(3, 9)}
    with pytest.raises(RequestRefusedError) as caught:
        await link.evict(7, 3, 9, 1.0, 0.0)
    assert caught.value.reason == REFUSED_ONLY_COPY
    assert link.mapped == {0: Place(3, 9)}
    await link.evict(8, 3, 9, 1.0, 0.0)  # another lease's: nothing to give up


@pytest.mark.parametrize("export_bytes", [0, 16 * MIB, 18 * MIB, (1 << 53) - 1])
async def test_a_lease_of_another_size_than_was_asked_for_is_refused(export_bytes: int) -> None:
    async def lease(slots_max: int) -> LeaseAnswer:
        assert slots_max == 17
        return LeaseAnswer(
            id=0,
            lease=7,
            token="0" * 32,
            epoch=1,
            reclaim="1" * 32,
            export_bytes=export_bytes,
            grace_ms=1,
        )

    nothing = cast(Any, None)
    config = SimpleNamespace(device=DEVICE, slab_count=1)
    link = DonorLink(HostPort("127.0.0.1", 1), nothing, nothing, cast(Any, config), nothing)
    with pytest.raises(ProtocolMismatchError, match="17 slabs"):
        await link._ensure_lease(cast(Any, SimpleNamespace(lease=lease)))


async def test_an_older_donor_is_never_asked_to_map_ahead() -> None:
    """It would not know what that is, and evict somebody else's slab for it."""
    asked: list[str] = []

    class Session:
        ended = None
        peer = ""
        welcome = SimpleNamespace(maps_ahead=False, donor_name="old")

        async def memory(self) -> Any:
            asked.append("memory")
            return MemoryAnswer(id=0, used_share=0.1, free_slabs=5, can_map=9)

    nothing = cast(Any, None)
    config = cast(Any, SimpleNamespace(device=DEVICE))
    link = DonorLink(HostPort("127.0.0.1", 1), nothing, nothing, config, nothing)
    link._session = cast(Any, Session())
    assert (await link.ask()).slabs_mappable == 9
    assert (await link.ask(ahead=True)).slabs_mappable == 0
    with pytest.raises(NoDonorError, match="ahead"):
        await link.map(0, ahead=True)
    assert asked == ["memory", "memory"]
    Session.welcome = SimpleNamespace(maps_ahead=True, donor_name="new")
    assert (await link.ask(ahead=True)).slabs_mappable == 5  # free ones only


class _Session:
    """One with a donor that answers."""

    def __init__(self, refusal: str = "") -> None:
        self.ended: str | None = None
        self.unmapped: list[tuple[int, int, int]] = []
        self.refusal = refusal

    async def wait_ended(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def unmap(self, lease: int, slot: int, generation: int) -> None:
        if self.refusal:
            raise RequestRefusedError("no", reason=self.refusal)
        self.unmapped.append((lease, slot, generation))

    def end(self) -> None:
        self.ended = "done"


def _evicted_link(session: _Session, slabs: _Slabs) -> DonorLink:
    """Without a backup; slab 0 is in slot 3."""
    engine = SimpleNamespace(
        slab_unmap=lambda slab, remote, generation: None,
        slab_pages_at=lambda slab, remote, generation: (0, False),
    )
    config = SimpleNamespace(has_backup=False, device=DEVICE)
    address, nothing = HostPort("127.0.0.1", 1), cast(Any, None)
    link = DonorLink(address, cast(Any, engine), cast(Any, slabs), cast(Any, config), nothing)
    link._lease = Lease(7, "", 1, "", MIB, "")
    link._session = cast(Any, session)
    link.remote = 0
    link.mapped = {0: Place(3, 9)}
    return link


@pytest.mark.parametrize("refusal", ["", REFUSED_STALE, REFUSED_BUSY])
async def test_a_slab_that_was_refused_and_then_given_up_is_unmapped_explicitly(
    refusal: str,
) -> None:
    """The donor no longer waits for the EVICT that was refused: told twice, its DONE is lost."""
    session, slabs = _Session(refusal), _Slabs()
    slabs.end.set_result(None)
    link = _evicted_link(session, slabs)
    with pytest.raises(RequestRefusedError):
        await link.evict(7, 3, 9, 2.0, 1.0)
    assert link.mapped
    slabs.moves = True
    await link.evict(7, 3, 9, 2.0, 1.0)
    assert not link.mapped
    assert session.unmapped == ([] if refusal else [(7, 3, 9)])
    # A donor that is too busy to hear it is told by the renewal.
    assert (session.ended is not None) == (refusal == REFUSED_BUSY)


async def test_done_alone_gives_a_slab_up_that_the_donor_waits_for() -> None:
    session, slabs = _Session(), _Slabs()
    slabs.end.set_result(None)
    slabs.moves = True
    link = _evicted_link(session, slabs)
    await link.evict(7, 3, 9, 2.0, 1.0)
    assert not link.mapped
    assert not session.unmapped


@pytest.mark.parametrize("incarnation", ["", "another"])
async def test_a_slab_whose_drain_ends_when_nobody_waits_is_given_back(
    monkeypatch: pytest.MonkeyPatch, incarnation: str
) -> None:
    """As after a host was suspended. A lease that is gone has no slab to give back."""
    monkeypatch.setattr("infiniswap.device.donors.link._DRAIN_S_MAX", 0.0)
    session, slabs = _Session(), _Slabs()
    link = _evicted_link(session, slabs)
    with pytest.raises(TimeoutError):
        await link.unmap(0, "refused")
    assert link.mapped
    link._lease = Lease(7, "", 2, "", MIB, incarnation)
    slabs.end.set_result(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not link.mapped
    assert session.unmapped == ([] if incarnation else [(7, 3, 9)])


async def test_a_drain_that_a_recovery_does_not_see_the_end_of_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no fault of ours: a host that was suspended for long sees its deadline pass."""
    link = _evicted_link(_Session(), _Slabs())
    tried: list[int] = []
    again = asyncio.Event()

    async def give_up() -> None:
        tried.append(1)
        if len(tried) == 1:
            raise TimeoutError("slab 0 has requests in flight")
        link._closing = True
        again.set()

    async def reclaim() -> bool:
        return False

    monkeypatch.setattr("infiniswap.device.donors.link._RETRY_S_MAX", 0.0)
    monkeypatch.setattr(link, "_is_down", lambda: True)
    monkeypatch.setattr(link, "_reclaim", reclaim)
    monkeypatch.setattr(link, "_give_up", give_up)
    link._recover()
    await asyncio.wait_for(again.wait(), 60)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "slab 0 has requests in flight" in caplog.text


class _Slabs:
    """A mapper that remembers what it was told."""

    def __init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()
        self.lost: list[int] = []
        self.moves = False

    def drained(self, slab: int, remote: int, generation: int) -> asyncio.Future[None]:
        return self.end

    async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
        return self.moves

    def evicted(self, link: DonorLink, slab: int) -> None:
        self.lost.append(slab)


async def test_an_eviction_does_not_outlive_its_session() -> None:
    """Whoever recovers the session waits for it, and the slab moves on all the same."""
    nothing = cast(Any, None)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    class Moving(Unmoved):
        cancelled = False

        async def move(self, link: DonorLink, slab: int, wait_s: float) -> bool:
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            return True

    async def wait_ended() -> None:
        await asyncio.shield(ended)

    slabs, config = Moving(), SimpleNamespace(has_backup=False, device=DEVICE)
    address = HostPort("127.0.0.1", 1)
    link = DonorLink(address, nothing, cast(Any, slabs), cast(Any, config), nothing)
    link._lease = Lease(7, "", 1, "", MIB, "")
    link._session = cast(Any, SimpleNamespace(wait_ended=wait_ended))
    link.mapped = {0: Place(3, 9)}
    loop.call_later(0.05, ended.set_result, None)
    with pytest.raises(SessionLostError):
        await asyncio.wait_for(link.evict(7, 3, 9, 900.0, 800.0), 60)
    assert slabs.cancelled
    assert link.mapped  # it moves on; at its end it is given back


async def test_a_slab_evicted_past_the_deadline_is_not_the_donors_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = cast(Any, None)
    engine = SimpleNamespace(slab_unmap=lambda slab, remote, generation: None)
    config = SimpleNamespace(has_backup=True, device=DEVICE)
    slabs = _Slabs()
    address = HostPort("127.0.0.1", 1)
    link = DonorLink(address, cast(Any, engine), cast(Any, slabs), cast(Any, config), nothing)
    link._lease = Lease(7, "", 1, "", MIB, "")
    link.remote = 0
    link.mapped = {0: Place(3, 9)}
    with pytest.raises(TimeoutError):
        await link.evict(7, 3, 9, 0.0, 0.0)
    assert slabs.lost == [0]  # the donor takes it anyway: another one is looked for
    assert link.mapped  # requests are in flight there
    # That costs the connections, once, which is no flapping of RDMA's either.
    lost: list[int] = []
    monkeypatch.setattr(link, "_is_down", lambda: True)
    monkeypatch.setattr(link, "_recover", lambda: None)
    monkeypatch.setattr(link.wire, "lost", lambda: lost.append(len(lost)))
    for count in (0, 1):
        link.connections_down(-ECONNRESET)
        assert len(lost) == count
    slabs.end.set_result(None)
    await asyncio.sleep(0)
    assert not link.mapped


async def test_a_donor_that_is_busy_is_asked_for_the_lease_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = cast(Any, None)
    config = SimpleNamespace(device=DEVICE, suspend_s=60.0)
    link = DonorLink(HostPort("127.0.0.1", 1), nothing, nothing, cast(Any, config), nothing)
    answers = [REFUSED_BUSY, REFUSED_BUSY, "", REFUSED_UNKNOWN_LEASE, ""]

    async def reclaim_once() -> bool:
        if reason := answers.pop(0):
            raise RequestRefusedError("not now", reason=reason)
        return True

    monkeypatch.setattr(link, "_reclaim_once", reclaim_once)
    assert await link._reclaim()
    assert not await link._reclaim()
    assert answers == [""]
    assert "lease gone" in link.detail
