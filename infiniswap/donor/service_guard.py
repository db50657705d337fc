# SPDX-License-Identifier: Apache-2.0
"""Protects a service of this host: measures its latency, and does what the policy says."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from infiniswap import events
from infiniswap.config import Config
from infiniswap.donor.evict import Evictor
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.latency import Latency, make_latency
from infiniswap.errors import InfiniswapError
from infiniswap.policy.slo import SloPolicy
from infiniswap.ticks import tick_pause_s

log = logging.getLogger(__name__)

_SAMPLES: Final = 10
"""In a settle time."""

_KEYS: Final = "(daemon.slo there)"


_LIMIT_SHARE: Final = 0.5
"""Of a settle time, for one measurement: several may fail before the last one is too old."""


class ServiceGuard:
    """Holds what is lent, and takes slabs back, while a service is in danger.

    Args:
        policy: decides.
        latency: measures.
        harvester: told how much may be lent.
        evictor: takes slabs back.
        clock: seconds, monotonic.
        counters: where `slo_unmeasured` and `slo_returned` are counted.
        move_s: how long consumers may take to copy a slab to another donor.

    Attributes:
        degraded: sentences for the status.
    """

    def __init__(
        self,
        policy: SloPolicy,
        latency: Latency,
        harvester: Harvester,
        evictor: Evictor,
        clock: Callable[[], float],
        counters: Counter[str],
        move_s: float,
    ) -> None:
        self._policy = policy
        self._latency = latency
        self._harvester = harvester
        self._evictor = evictor
        self._clock = clock
        self._counters = counters
        self.move_s = move_s
        self.degraded: list[str] = []
        self._failure = ""
        self._was_held = self._was_blind = False
        self._limit(0, f"has not measured the service that it protects yet {_KEYS}")

    @property
    def ratio(self) -> float:
        """The newest latency as a share of its bound; 0 before the first."""
        return self._policy.latency / self._policy.bound

    @property
    def is_blind(self) -> bool:
        """Whether the latency is unknown."""
        return self._policy.is_blind(self._clock())

    async def run(self) -> None:
        """Measures and acts until cancelled."""
        period_s = self._policy.settle_s / _SAMPLES
        try:
            while True:
                await self.look()
                await self.act()
                await asyncio.sleep(tick_pause_s(asyncio.get_running_loop().time(), period_s))
        finally:
            await self._latency.close()

    async def look(self) -> None:
        """One measurement."""
        try:
            async with asyncio.timeout(self._policy.settle_s):
                value = await self._latency.read()
        except (InfiniswapError, TimeoutError) as error:
            self._counters["slo_unmeasured"] += 1
            said = str(error) or "no measurement in time"
            if not self._failure:
                log.warning("the latency of the protected service cannot be measured: %s", said)
            self._failure = said
            return
        if self._failure:
            log.info("the latency of the protected service can be measured again")
        self._failure = ""
        self._policy.observe(self._clock(), value)

    async def act(self) -> None:
        """Holds, lends, or takes slabs back."""
        pool = self._harvester.pool
        mapped, slabs_max = pool.state().mapped, self._harvester.policy.config.slabs_max
        advice = self._policy.advise(self._clock(), mapped, slabs_max)
        self._limit(advice.mapped_max, self._why())
        self._tell()
        if not advice.give_back:
            return
        try:
            brought = await self._evictor.evict(advice.give_back, move_s=self.move_s, busiest=True)
            self._counters["slo_returned"] += brought
            # They are this host's again, and zeroing them would take memory bandwidth.
            while self._harvester.is_held and pool.state().dirty and await pool.release():
                pass
        except InfiniswapError as error:
            log.error("slabs cannot be taken back: %s", error)

    def _limit(self, mapped_max: int, why: str) -> None:
        self._harvester.mapped_max, self._harvester.held_why = mapped_max, why

    def _why(self) -> str:
        policy = self._policy
        if self.is_blind:
            cause = self._failure or "no measurement yet"
            return f"cannot measure the service that it protects {_KEYS}: {cause}"[:500]
        return (
            f"protects a service of its host, whose latency is {policy.latency:g} of at most "
            f"{policy.bound:g} {_KEYS}"
        )

    def _tell(self) -> None:
        """Says once what has begun or ended."""
        is_blind = self.is_blind
        self.degraded = [f"this donor {self._why()}; it lends nothing more"] if is_blind else []
        if is_blind and not self._was_blind:
            log.error(
                "nothing more is lent: this donor %s",
                self._why(),
                extra=events.about(events.SERVICE_UNMEASURED),
            )
        is_held = self._policy.is_held
        if is_held and not self._was_held:
            log.warning(
                "nothing more is lent: the latency of the protected service is %g, its bound %g",
                self._policy.latency,
                self._policy.bound,
                extra=events.about(events.SERVICE_IN_DANGER),
            )
        elif self._was_held and not is_held:
            log.info(
                "the protected service keeps its bound: more is lent again",
                extra=events.about(events.SERVICE_WELL),
            )
        self._was_blind, self._was_held = is_blind, is_held


def make_guard(
    config: Config,
    harvester: Harvester,
    evictor: Evictor,
    clock: Callable[[], float],
    counters: Counter[str],
) -> ServiceGuard | None:
    """What protects the service that the configuration names; None: it names none.

    Raises:
        ConfigError: others can change the program that is to measure its latency.
    """
    slo = config.slo
    if not slo.is_set:
        return None
    return ServiceGuard(
        SloPolicy(slo.bound, slo.settle_s),
        make_latency(slo, _LIMIT_SHARE * slo.settle_s),
        *(harvester, evictor, clock, counters),
        config.daemon.evict_move_s,
    )
