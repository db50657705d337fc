# SPDX-License-Identifier: Apache-2.0
"""Devices and donors under a seeded scheduler; see tests/simulation/.

INFINISWAP_TEST_SEEDS says how many seeds, INFINISWAP_TEST_SEED runs one and tells what happens.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from simulation.device import SimDevice
from simulation.model import Pages, page_bytes
from simulation.three_slabs import SLABS, ThreeSlabs
from simulation.world import SimulationError, World
from support.machine.background import Background, Job
from support.machine.ran import ran
from support.machine.runmode import FULL

# A daemon that is killed leaves calls behind that had not begun.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

SEEDS = int(os.environ.get("INFINISWAP_TEST_SEEDS", "1000" if FULL else "400"))
SEED = os.environ.get("INFINISWAP_TEST_SEED")
PARTS = 8
PART_S_MAX = 1200
TESTS = Path(__file__).resolve().parents[1]
KINDS = 20
"""Of faults."""


def fail(seed: int, error: str) -> NoReturn:
    pytest.fail(
        f"{error}\nAgain, with a log: INFINISWAP_TEST_SEED={seed} "
        "python -m pytest tests/unit/test_simulation.py",
        pytrace=False,
    )


def lived(world: World) -> World:
    try:
        world.run()
    except SimulationError as error:
        fail(world.seed, str(error))
    gc.collect()  # what a seed has left is said here, and not in another test
    return world


def seeds(part: int) -> list[int]:
    return list(range(part + 1, SEEDS + 1, PARTS))


def background_jobs(
    items: Sequence[pytest.Function], new_directory: Callable[[], Path]
) -> dict[str, Job]:
    """Each part in an interpreter of its own."""
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    jobs = {}
    for item in items:
        part = int(str(item.callspec.params["part"]))
        argv = [sys.executable, "-m", "simulation", str(new_directory()), *map(str, seeds(part))]
        jobs[f"simulation-{part}"] = Job(argv, TESTS, PART_S_MAX, env)
    return jobs if SEED is None else {}


@pytest.mark.background
@pytest.mark.timeout(1500)
@pytest.mark.skipif(SEED is not None, reason="one seed was asked for")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_invariants_hold_whatever_happens(part: int, background: Background) -> None:
    done = background.result(f"simulation-{part}")
    assert not done.stderr, done.stderr.decode()
    told = json.loads(done.stdout)
    if "error" in told:
        fail(told["seed"], told["error"])
    assert len(told["traces"]) == len(seeds(part))
    if len(told["traces"]) >= 50:
        assert len(told["happened"]) == KINDS, told["happened"]  # each fault, in each part
        assert told["migrated"]


@pytest.mark.skipif(SEED is None, reason="for INFINISWAP_TEST_SEED")
def test_the_seed_that_was_asked_for(tmp_path: Path) -> None:
    world = lived(World(int(SEED or 0), tmp_path, is_loud=True))
    assert sum(device.reads for device in world.devices)


def test_a_seed_replays_exactly(tmp_path: Path) -> None:
    """In this process twice, and in another one whose addresses and hashes differ."""
    some = (3, 4, 5, 6)
    first, second = (  # a donor that is drained at the end leaves word of it
        [lived(World(seed, tmp_path / run)).loop.trace for seed in some] for run in ("a", "b")
    )
    assert first == second
    assert len(set(first)) == len(some)  # another seed is another world
    env = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "1"}
    other = ran(sys.executable, "-m", "simulation", tmp_path, *map(str, some), env=env)
    assert json.loads(other.stdout)["traces"] == first


def test_the_model_tells_old_torn_and_foreign_bytes() -> None:
    pages = Pages(2)
    pages.written(0, 7, 1.0).completed = 2.0
    pages.written(0, 8, 3.0)
    assert not pages.wrong(0, page_bytes(7), since=4.0)  # the other one is under way
    assert not pages.wrong(0, page_bytes(8), since=4.0)
    assert "holds 0" in pages.wrong(0, page_bytes(0), since=4.0)
    assert "holds 9" in pages.wrong(0, page_bytes(9), since=4.0)
    assert "torn" in pages.wrong(0, page_bytes(7)[:2048] + page_bytes(8)[:2048], since=4.0)
    assert not pages.wrong(1, page_bytes(0), since=4.0)


# -------------------------------------------------- two runs and a donor of three slabs


def plot(live: Callable[[ThreeSlabs], None]) -> Callable[[int], None]:
    """Decorates a test: it lives in worlds of several seeds."""

    @pytest.mark.parametrize("seed", range(5))
    def test(seed: int) -> None:
        lived(ThreeSlabs(seed, live))

    return test


@plot
def test_slabs_mapped_ahead_that_stay_untouched_go_back_after_half_a_minute(w: ThreeSlabs) -> None:
    first = w.add_device()
    w.until_mapped(first, [0, 1], 10.0)
    w.rest(25.0)
    assert w.mapped(first) == [0, 1]
    w.until_mapped(first, [], 15.0)
    w.until(lambda: first.mapper.counts.returned == 2, 5.0, "both were given back")
    w.rest(60.0)  # and are not taken again by a run that does not page
    assert w.mapped(first) == []


@plot
def test_of_two_runs_and_three_free_slabs_neither_starves_the_other(w: ThreeSlabs) -> None:
    first = w.add_device()
    w.until_mapped(first, [0, 1], 10.0)
    w.pages_out_until(first, 0, lambda: len(w.mapped(first)) == SLABS)  # all that there is
    second = w.add_device()
    w.rest(5.0)
    assert w.mapped(second) == []  # ahead it takes what is free, and nothing is
    assert w.mapped(first) == [0, 1, 2]
    # What it needs it gets, at once, and of those that the other one does not use.
    assert w.pages_out_until(second, 0, lambda: w.has(second, 0)) <= 5.0
    assert w.pages_out_until(second, 1, lambda: w.has(second, 1)) <= 5.0
    assert w.mapped(first) == [0]
    assert (first.mapper.counts.evicted, first.mapper.counts.returned) == (0, 2)
    # Nor does anybody lose what it uses, however much the other one would like to have.
    for slab in (0, 1):
        w.page_out(second, slab)
    end_s = w.loop.now_s + 20.0
    w.pages_out_until(first, 1, lambda: w.loop.now_s > end_s)
    assert (w.mapped(first), w.mapped(second)) == ([0], [0, 1])


@plot
def test_two_runs_that_began_together_both_get_a_donor_for_what_they_use(w: ThreeSlabs) -> None:
    first, second = w.add_device(), w.add_device()
    w.rest(5.0)
    assert len(w.mapped(first)) + len(w.mapped(second)) == SLABS
    for device in (first, second):
        assert w.pages_out_until(device, 0, functools.partial(w.has, device, 0)) < 5.0
    for device in (first, second):
        w.page_out(device, 0)  # now it is there for sure
    w.rest(75.0)  # one may have taken what the other gave back, for half a minute
    assert (w.mapped(first), w.mapped(second)) == ([0], [0])
    assert first.mapper.counts.evicted + second.mapper.counts.evicted == 0


# ------------------------------------------------- tenants of a host at a donor of three slabs


def sweep_of_two(w: ThreeSlabs) -> list[SimDevice]:
    """Two devices of one tenant that have the whole pool, and go on using it."""
    sweep = [w.add_device("sweep", ahead_share=0.0) for _ in range(2)]
    for device, slab in ((sweep[0], 0), (sweep[1], 0), (sweep[0], 1)):
        w.pages_out_until(device, slab, functools.partial(w.has, device, slab))
    return sweep


def held(w: ThreeSlabs, devices: list[SimDevice]) -> int:
    return sum(len(w.mapped(device)) for device in devices)


@plot
def test_the_devices_of_a_sweep_are_one_tenant_of_their_host(w: ThreeSlabs) -> None:
    w.network.one_address = "host"
    sweep = sweep_of_two(w)
    other = w.add_device("one", ahead_share=0.0)
    w.pages_out_until(other, 0, lambda: w.has(other, 0))
    assert held(w, sweep) == 2
    # Nobody can take more from the other, though all of them page to slabs without a donor.
    for _ in range(8):
        for device in (*sweep, other):
            for slab in (0, 1):
                w.page_out(device, slab)
        w.rest(0.2)
    assert (held(w, sweep), held(w, [other])) == (2, 1)


@plot
def test_devices_without_a_tenant_divide_nothing(w: ThreeSlabs) -> None:
    w.network.one_address = "host"
    first, second = w.add_device(ahead_share=0.0), w.add_device(ahead_share=0.0)
    for slab in range(SLABS):
        w.pages_out_until(first, slab, functools.partial(w.has, first, slab))
    end_s = w.loop.now_s + 10.0
    w.pages_out_until(second, 0, lambda: w.loop.now_s > end_s)
    assert (held(w, [first]), held(w, [second])) == (SLABS, 0)


@plot
def test_tenants_stay_what_they_are_when_the_daemon_is_killed(w: ThreeSlabs) -> None:
    w.network.one_address = "host"
    sweep = sweep_of_two(w)
    w.donor.crash(silently=False, keeps=True)
    w.rest(0.2)
    w.donor.start()
    other = w.add_device("one", ahead_share=0.0)
    w.pages_out_until(other, 0, lambda: w.has(other, 0))
    w.rest(5.0)
    assert (held(w, sweep), held(w, [other])) == (2, 1)
    assert {lease.tenant[1] for lease in w.donor.service.table.leases()} == {"sweep", "one"}
