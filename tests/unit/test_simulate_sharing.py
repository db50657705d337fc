# SPDX-License-Identifier: Apache-2.0
"""Slowdown of jobs in the simulator, and the ways to share donors that are full."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from infiniswap.config import Config
from infiniswap.errors import ConfigError
from infiniswap.policy.eviction import EvictionConfig
from infiniswap.policy.headroom import HeadroomConfig
from infiniswap.simulation.device import Device
from infiniswap.simulation.donor import DonorHost
from infiniswap.simulation.runner import simulate
from infiniswap.simulation.scenario import Cluster, Jobs, Run, Scenario, Sharing
from infiniswap.simulation.sharing import AttainedDonor
from infiniswap.simulation.world import World
from infiniswap.units import GIB

RUN = Run(duration_s=400.0, slowdown_donors=2.0, slowdown_disk=8.0)


def scenario(*jobs: Jobs, pool_gib: int = 8, **changes: Any) -> Scenario:
    """One host with these jobs, and one donor."""
    config = Config()
    config = replace(config, daemon=replace(config.daemon, pool_bytes=pool_gib * GIB))
    cluster = Cluster(hosts=2, donors=1, memory_bytes=64 * GIB)
    return Scenario("test", cluster=cluster, run=RUN, jobs=jobs, config=config, **changes)


def job(**values: Any) -> Jobs:
    return Jobs(**{"working_set_bytes": 8 * GIB, "work_s": 10.0, **values})


def test_a_job_that_fits_is_as_fast_as_its_work() -> None:
    world = World(scenario(job(local=1.0)), 1)
    world.run()
    assert world.slowdowns() == [("job", 1.0)]


@pytest.mark.parametrize("slabs", [8, 4, 1])
def test_a_job_is_as_slow_as_what_serves_its_pages(slabs: int) -> None:
    """It has eight slabs, and donors for so many of them."""
    world = World(scenario(job(local=0.0, work_s=1e6), pool_gib=slabs), 1)
    world.run()
    ((_, found),) = world.slowdowns()
    served = slabs / 8
    # Slabs have a donor once they are hot, and are filled a while later.
    assert found == pytest.approx(served + (1.0 - served) * 8.0 / 2.0, rel=0.15)


def donor(kind: type[DonorHost], slabs: int) -> DonorHost:
    limits = HeadroomConfig(GIB, 8 * GIB, slabs * GIB, GIB // 4, 1)
    made = kind(0, 64 * GIB, limits, EvictionConfig(), 0.5, Random(1), 1.0)
    made.observe(0.0, 0)
    return made


def device(number: int, host: int, attained_gib_s: float) -> Device:
    made = Device(number, host, job(), GIB, Config().policy, 0.0, 0.0, 1.0)
    made.attained_gib_s = attained_gib_s
    return made


def test_the_heaviest_of_the_lowest_queue_of_a_host_gives_first() -> None:
    full = donor(AttainedDonor, 4)
    heavy, heavier, middle = device(1, 1, 3000.0), device(2, 1, 4000.0), device(3, 1, 500.0)
    for one in (heavy, heavier, middle):
        assert full.make_ready()
        full.lend(one, 0)
    new = device(4, 1, 0.0)
    assert [lent.device for lent in full.gives(new)] == [heavier]
    assert [lent.device for lent in full.gives(middle)] == [heavier]
    # What lacks slabs for long is in the first queue again.
    heavier.waited_s = 1e6
    assert [lent.device for lent in full.gives(new)] == [heavy]
    assert heavier.attained_gib_s == 0.0
    # Within a queue nobody gives, and another host gets its share and no more.
    assert not full.gives(heavy)
    other = device(5, 2, 0.0)
    assert [lent.device for lent in full.gives(other)] == [heavy]
    full.make_ready()
    full.lend(other, 0)
    for lent in list(full.held)[:2]:
        full.take(lent)
    assert not full.gives(other)


def test_without_work_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="no job has work"):
        simulate(scenario(job(work_s=0.0), sharing=Sharing()), 1)


def test_a_sweep_of_one_tenant_no_longer_keeps_everything() -> None:
    sweep = job(name="sweep", tenant="sweep", count=8, local=0.5, work_s=1e6)
    other = job(name="other", tenant="other", start_s=100.0, local=0.5, work_s=1e6)
    given = scenario(sweep, other, sharing=Sharing(ways=("host", "tenant")))
    rows = {(row.way, row.job): row for row in simulate(given, 1).sharing or ()}
    assert rows["host", "other"].mean == pytest.approx(4.0)  # all from the disk
    assert rows["tenant", "other"].mean < 2.0
    assert rows["tenant", "sweep"].jobs == 8
    assert (rows["host", "all"].evictions, rows["tenant", "all"].evictions) == (0, 4)
