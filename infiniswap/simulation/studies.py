# SPDX-License-Identifier: Apache-2.0
"""The policies alone beside the closed forms: no hosts, no time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec import Struct

from infiniswap.config import PolicyConfig
from infiniswap.policy.eviction import BatchChoice, EvictionConfig
from infiniswap.policy.placement import Ask, Choose, MemoryUse, Placement
from infiniswap.simulation import theory
from infiniswap.simulation.scenario import Choices, Eviction

_LIGHT, _BUSY = 1.0, 1000.0
_LEVELS = 3
_CAPACITY = 1_000
"""Slabs of a donor: more than any gets."""

Progress = Callable[[float], None]


class EvictionRow(Struct, frozen=True):
    """For one E'.

    Attributes:
        seen: part of the batches that took light slabs only.
        exact: without replacement.
        binomial: with very many slabs.
    """

    extra: int
    seen: float
    exact: float
    binomial: float


def eviction(study: Eviction, seed: int, progress: Progress | None = None) -> list[EvictionRow]:
    """Batches as the donor's evictor chooses them."""
    rng = Random(f"{seed}/eviction")
    busy = round(study.busy_share * study.slabs)
    mapped = list(range(study.slabs))
    activity = {slab: _BUSY if slab < busy else _LIGHT for slab in mapped}
    rows = []
    for place, extra in enumerate(study.extra):
        config = EvictionConfig(slabs_max=study.evict, extra=extra)
        choice: BatchChoice[int] = BatchChoice(config, rng)
        light = 0
        for _ in range(study.batches):
            batch = choice.ask(mapped, study.evict, 0.0, in_hurry=True)
            taken = choice.take(batch, activity, in_hurry=True)
            light += all(activity[slab] == _LIGHT for slab in taken)
        rows.append(
            EvictionRow(
                extra,
                light / study.batches,
                theory.all_light(study.slabs, busy, study.evict, extra),
                theory.all_light_limit(study.busy_share, study.evict, extra),
            )
        )
        if progress is not None:
            progress((place + 1) / len(study.extra))
    return rows


class ChoicesRow(Struct, frozen=True):
    """For one number of donors.

    Attributes:
        seen: fraction of donors with at least 1, 2, ... slabs.
        exact: of very many donors.
    """

    donors: int
    seen: list[float]
    exact: list[float]


def choices(
    study: Choices, policy: PolicyConfig, seed: int, progress: Progress | None = None
) -> list[ChoicesRow]:
    """One slab of each of as many devices as there are donors, so that every donor is new."""
    exact = theory.two_choices(_LEVELS, choices=policy.choices)
    rows = []
    for place, count in enumerate(study.donors):
        loads = place_one_by_one(count, policy, Random(f"{seed}/choices/{count}"))
        seen = [sum(load > level for load in loads) / count for level in range(_LEVELS)]
        rows.append(ChoicesRow(count, seen, exact))
        if progress is not None:
            progress((place + 1) / len(study.donors))
    return rows


def place_one_by_one(donors: int, policy: PolicyConfig, rng: Random) -> list[int]:
    """Slabs by donor after as many slabs have been placed as there are donors."""
    numbers = range(donors)
    loads = [0] * donors
    for _ in numbers:
        placement = Placement(numbers, (), rng, policy)
        while isinstance(step := placement.next(), Ask):
            for donor in step.donors:
                load = loads[donor]
                placement.answered(donor, MemoryUse(load / _CAPACITY, _CAPACITY - load))
        assert isinstance(step, Choose)
        loads[step.donor] += 1
    return loads
