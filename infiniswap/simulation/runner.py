# SPDX-License-Identifier: Apache-2.0
"""Runs a whole scenario for one seed: its studies, its comparison, or its cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import Struct

from infiniswap.errors import ConfigError
from infiniswap.simulation import studies
from infiniswap.simulation.load import HostLoad, host_load
from infiniswap.simulation.measures import Result
from infiniswap.simulation.optimum import Best, best
from infiniswap.simulation.scenario import Scenario
from infiniswap.simulation.sharing import SharingRow, sharing
from infiniswap.simulation.world import World

Progress = Callable[[float], None]


class Simulated(Struct, frozen=True):
    """All that one seed gives; what the scenario does not ask for is None."""

    title: str
    seed: int
    cluster: Result | None = None
    optimum: Best | None = None
    eviction: list[studies.EvictionRow] | None = None
    choices: list[studies.ChoicesRow] | None = None
    compare: list[ComparedRow] | None = None
    sharing: list[SharingRow] | None = None


class ComparedRow(Struct, frozen=True):
    """One rule with one number of hosts.

    Attributes:
        used: mean used share of a host, slabs that it lends included, over the run.
        max_median: of the hosts' used shares, mean over the run.
        p99_median: likewise.
        unmapped: slabs that want a donor and have none, at the end.
    """

    rule: str
    hosts: int
    used: float
    max_median: float
    p99_median: float
    mapped: int
    not_placed: int
    unmapped: int
    evictions: int
    messages_per_slab: float


def simulate(scenario: Scenario, seed: int, progress: Progress | None = None) -> Simulated:
    """Runs it.

    Raises:
        InfiniswapError: a package or a file is missing, or the scenario cannot work.
    """
    outcome = Simulated(title=scenario.title, seed=seed)
    is_study = scenario.eviction is not None or scenario.choices is not None
    if scenario.eviction is not None:
        rows = studies.eviction(scenario.eviction, seed, progress)
        outcome = _with(outcome, eviction=rows)
    if scenario.choices is not None:
        found = studies.choices(scenario.choices, scenario.config.policy, seed, progress)
        outcome = _with(outcome, choices=found)
    if scenario.compare is not None:
        return _with(outcome, compare=_compare(scenario, seed, progress))
    if scenario.sharing is not None:
        return _with(outcome, sharing=sharing(scenario, scenario.sharing.ways, seed, progress))
    if is_study and not scenario.jobs:
        return outcome
    if not scenario.jobs and not scenario.load.quantiles and not scenario.trace_path:
        raise ConfigError(
            "there is nothing to simulate",
            where=scenario.origin,
            mend="Add [[jobs]], [load], [eviction] or [choices].",
        )
    world = World(scenario, seed)
    outcome = _with(outcome, cluster=world.run(progress))
    if scenario.optimum is not None:
        return _with(outcome, optimum=best(world, scenario.optimum.limit_s))
    return outcome


def _with(outcome: Simulated, **parts: object) -> Simulated:
    """With other parts."""
    values = {name: getattr(outcome, name) for name in Simulated.__struct_fields__}
    return Simulated(**{**values, **parts})


def _compare(scenario: Scenario, seed: int, progress: Progress | None) -> list[ComparedRow]:
    assert scenario.compare is not None
    rows: list[ComparedRow] = []
    sizes, rules = scenario.compare.hosts, scenario.compare.rules
    total = sum(sizes) * len(rules)
    done = 0
    for hosts in sizes:
        own = scaled(scenario, hosts)
        for rule in rules:
            load: HostLoad = host_load(own, seed)  # each rule sees the same hosts

            def tell(part: float, before: int = done, hosts: int = hosts) -> None:
                if progress is not None:
                    progress((before + part * hosts) / total)

            rows.append(_row(World(own, seed, rule, load).run(tell), hosts))
            done += hosts
    return rows


def scaled(scenario: Scenario, hosts: int) -> Scenario:
    """The scenario with another number of hosts, and as many jobs for each of them."""
    ratio = hosts / scenario.cluster.hosts
    jobs = tuple(replace(j, count=max(1, round(j.count * ratio))) for j in scenario.jobs)
    return replace(scenario, cluster=replace(scenario.cluster, hosts=hosts), jobs=jobs)


def _row(result: Result, hosts: int) -> ComparedRow:
    rows = result.rows[1:] or result.rows
    return ComparedRow(
        rule=result.rule,
        hosts=hosts,
        used=sum(row.slabs.mean for row in rows) / len(rows),
        max_median=sum(row.slabs.max_median or 0.0 for row in rows) / len(rows),
        p99_median=sum(row.slabs.p99_median or 0.0 for row in rows) / len(rows),
        mapped=result.counts["mapped"],
        not_placed=result.counts["not_placed"],
        unmapped=rows[-1].unmapped,
        evictions=result.counts["evictions"],
        messages_per_slab=result.messages_per_slab or 0.0,
    )
