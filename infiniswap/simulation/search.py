# SPDX-License-Identifier: Apache-2.0
"""A slab's search for a donor, by the product's rule or by one that it is compared with."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

from infiniswap.config import PolicyConfig
from infiniswap.policy.placement import Ask, Choose, MemoryUse, Placement
from infiniswap.simulation.device import Device
from infiniswap.simulation.donor import DonorHost


class MapSlab(Protocol):
    """Maps a device's slab to a donor; False: it was refused."""

    def __call__(self, device: Device, slab: int, donor: DonorHost, now_s: float) -> bool: ...


class Search(Protocol):
    """A rule."""

    def place(self, device: Device, slab: int, now_s: float, leaving: DonorHost | None) -> bool:
        """Maps a slab to a donor, not to the one that it is leaving; False: none has room."""


class Asking:
    """Asks donors as infiniswap.policy.placement says, and notes the outcome as the device's placer
    does (infiniswap.device.slabs.placer).

    Args:
        donors: all of them.
        policy: how many are asked at once.
        rng: source of randomness.
        map_slab: maps the slab.
        messages: counts requests and answers by kind.
    """

    def __init__(
        self,
        donors: Sequence[DonorHost],
        policy: PolicyConfig,
        rng: Random,
        map_slab: MapSlab,
        messages: Counter[str],
    ) -> None:
        self._donors = donors
        self._policy = policy
        self._rng = rng
        self._map_slab = map_slab
        self._messages = messages

    def place(self, device: Device, slab: int, now_s: float, leaving: DonorHost | None) -> bool:
        """See Search."""
        backoff = device.backoff

        def may_ask(donor: DonorHost) -> bool:
            is_other = donor.number != device.host and donor is not leaving
            return is_other and backoff.is_eligible(donor, now_s)

        placement = Placement(self._donors, device.donors, self._rng, self._policy, may_ask)
        while True:
            step = placement.next()
            if isinstance(step, Ask):
                for donor in step.donors:
                    placement.answered(donor, self._ask(device, donor, now_s))
            elif isinstance(step, Choose):
                if self._map_slab(device, slab, step.donor, now_s):
                    return True
                backoff.full(step.donor, now_s)
                placement.refused(step.donor)
            else:
                return False

    def _ask(self, device: Device, donor: DonorHost, now_s: float) -> MemoryUse | None:
        self._messages["memory"] += 1 + donor.is_alive
        if not donor.is_alive:
            device.backoff.unreachable(donor, now_s)
            return None
        use = donor.use(device)
        if use.slabs_mappable:
            device.backoff.good(donor)
        else:
            device.backoff.full(donor, now_s)
        return use


class GlobalView:
    """The least used donor of all, the new ones first. It costs no question: no host can know this,
    and it is what rules are compared with.

    Args:
        donors: all of them.
        map_slab: maps the slab.
    """

    def __init__(self, donors: Sequence[DonorHost], map_slab: MapSlab) -> None:
        self._donors = donors
        self._map_slab = map_slab
        self._made_s = float("-inf")
        self._heap: list[tuple[float, int]] = []

    def place(self, device: Device, slab: int, now_s: float, leaving: DonorHost | None) -> bool:
        """See Search."""
        if now_s != self._made_s:
            self._made_s = now_s
            self._heap = [(d.used_share(), d.number) for d in self._donors if d.is_alive]
            heapq.heapify(self._heap)
        left: list[int] = []
        old: list[int] = []
        try:
            while self._heap:
                share, number = heapq.heappop(self._heap)
                donor = self._donors[number]
                if donor.used_share() > share:  # since it was put there
                    heapq.heappush(self._heap, (donor.used_share(), number))
                    continue
                left.append(number)
                if number == device.host or donor is leaving:
                    continue
                if donor in device.donors:
                    old.append(number)
                elif self._take(device, slab, donor, now_s):
                    return True
            return any(self._take(device, slab, self._donors[n], now_s) for n in old)
        finally:
            for number in left:
                heapq.heappush(self._heap, (self._donors[number].used_share(), number))

    def _take(self, device: Device, slab: int, donor: DonorHost, now_s: float) -> bool:
        has_room = donor.is_alive and donor.use(device).slabs_mappable > 0
        return has_room and self._map_slab(device, slab, donor, now_s)


def search_for(
    rule: str,
    donors: Sequence[DonorHost],
    policy: PolicyConfig,
    rng: Random,
    map_slab: MapSlab,
    messages: Counter[str],
) -> Search:
    """The search of a rule (infiniswap.simulation.scenario.RULES)."""
    if rule == "global":
        return GlobalView(donors, map_slab)
    choices = {"random": 1, "four": 4}.get(rule, policy.choices)
    return Asking(donors, replace(policy, choices=choices), rng, map_slab, messages)
