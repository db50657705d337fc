# SPDX-License-Identifier: Apache-2.0
"""Pages over RDMA: both ends exchange what their connections need over the control session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

from infiniswap import events
from infiniswap.control import messages as m
from infiniswap.device.donors.lease import Place
from infiniswap.device.donors.transports.base import Dial, Target, Transport, UnusableError
from infiniswap.engine.protocol import Engine, OffLoop
from infiniswap.engine.rdma import EngineRdma, RdmaOffer
from infiniswap.errors import EngineError, InfiniswapError, RequestRefusedError
from infiniswap.ticks import next_tick
from infiniswap.units import counted

log = logging.getLogger(__name__)

_TAKE_BACK_S = 0.2
"""For an answer that is only good to know: a recovery may have to wait for it."""
_LOOK_S = 1.0


def _native(engine: Engine) -> EngineRdma:
    from infiniswap.engine.native_rdma import NativeEngineRdma  # late: it needs the extension

    return NativeEngineRdma(engine)


class Rdma(Transport):
    """See Transport.

    Args:
        engine, blocking: see Transport.
        rdma_of: the RDMA side of an engine; a test gives another one.
    """

    name = "rdma"
    label = "RDMA"

    def __init__(
        self,
        engine: Engine,
        blocking: OffLoop,
        rdma_of: Callable[[Engine], EngineRdma] = _native,
    ) -> None:
        super().__init__(engine, blocking)
        self._rdma_of = rdma_of

    @classmethod
    def check(cls, host: str) -> None:
        """See Transport."""
        from infiniswap.engine.native_rdma import rdma_choose

        rdma_choose(host)

    @classmethod
    def preload(cls) -> None:
        """See Transport."""
        from infiniswap.engine.native_rdma import preload_rdma

        preload_rdma()

    @classmethod
    def watch(cls, engine: Engine, blocking: OffLoop) -> Coroutine[Any, Any, None]:
        """See Transport."""
        return let_go(
            _native(engine), blocking, lambda: any(remote.by_rdma for remote in engine.remotes())
        )

    @classmethod
    def is_offered(cls, welcome: m.Welcome) -> bool:
        """See Transport."""
        return welcome.rdma

    async def connect(self, target: Target, dial: Dial, *, is_trial: bool = False) -> int:
        """See Transport."""
        rdma = self._rdma_of(self._engine)
        slots = target.lease.export_bytes // target.session.welcome.slab_bytes
        offers: list[RdmaOffer] = []
        answer: m.RdmaAnswer | None = None

        def make() -> RdmaOffer:
            offers.append(rdma.offer(target.config.host, target.config.queues, slots))
            return offers[0]

        try:
            with _unusable("here: ", EngineError):
                offer = await self._blocking(make)
            try:
                with _unusable("at the donor: ", RequestRefusedError, m.REFUSED_NO_RDMA):
                    answer = await target.session.rdma(target.lease.lease, offer.ends)
                _check(answer, len(offer.ends), slots, target.places)
                # For the TCP connection by which each end sees the other's death.
                config = await self._with_tickets(target, 1, is_trial=is_trial)
                config = replace(config, over=offer.answered(answer.ends, answer.probe))
                with _unusable("", EngineError):
                    remote = await self._blocking(lambda: dial(config))
            except BaseException as error:
                # A donor that refused has made nothing.
                refused = isinstance(error.__cause__ or error, RequestRefusedError)
                if answer is not None or not refused:
                    await self._take_back(target)
                raise
        finally:
            # Also an offer that was made while this task was cancelled.
            for made in offers:
                await self._blocking(made.close)
        if not is_trial:
            for slot in answer.slots:
                rdma.slot_key(remote, slot.slot, slot.key)
        return remote

    @staticmethod
    async def _take_back(target: Target) -> None:
        """The donor's half would wait for us until the lease ends, and the donor would refuse to
        map what it cannot register. What it has registered stays so for the next time."""
        if target.session.ended is None:
            with contextlib.suppress(InfiniswapError, TimeoutError):
                async with asyncio.timeout(_TAKE_BACK_S):
                    await target.session.rdma(target.lease.lease, [])

    def mapped(self, remote: int, answer: m.MapAnswer) -> None:
        """See Transport."""
        if answer.key is None:
            raise EngineError("the donor gave no key for the slab, so RDMA cannot reach it")
        self._rdma_of(self._engine).slot_key(remote, answer.slot, answer.key)


def _check(answer: m.RdmaAnswer, count: int, slots: int, places: frozenset[Place]) -> None:
    if len(answer.ends) != count:
        raise UnusableError(f"the donor answered with {len(answer.ends)} ends, not {count}")
    there = {Place(slot.slot, slot.generation) for slot in answer.slots}
    # The engine would refuse its key when it is connected already.
    if beyond := [place.slot for place in there if place.slot >= slots]:
        raise UnusableError(f"the donor named slot {beyond[0]} of a lease of {slots}")
    if missing := len(places - there):
        raise UnusableError(
            f"the donor could register {len(places) - missing} "
            f"of {counted(len(places), 'slab')} of ours"
        )


@contextlib.contextmanager
def _unusable(where: str, kind: type[InfiniswapError], reason: str = "") -> Iterator[None]:
    """Makes an UnusableError of an error of that kind, and for that reason."""
    try:
        yield
    except kind as error:
        if getattr(error, "reason", "") != reason:
            raise
        raise UnusableError(where + error.what.removeprefix("no RDMA: ")) from error


async def let_go(
    rdma: EngineRdma,
    blocking: OffLoop,
    is_used: Callable[[], bool],
    sleep: Callable[[float], Awaitable[None]] = next_tick,
) -> None:
    """Ends connections over RDMA devices that this host removes, as long as the device serves.

    The kernel may wait with the removal until the device's process has let go. Pages then go over
    TCP.
    """
    while True:
        await sleep(_LOOK_S)
        try:
            if is_used() and await blocking(rdma.let_go) > 0:
                log.warning(
                    "an RDMA device is being removed: its connections are ended",
                    extra=events.about(events.RDMA_REMOVED),
                )
        except Exception:
            log.exception("whether an RDMA device is being removed cannot be seen")
