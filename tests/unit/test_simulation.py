# SPDX-License-Identifier: Apache-2.0
"""Devices and donors under a seeded scheduler; see tests/simulation/.

INFINISWAP_TEST_SEEDS says how many seeds, INFINISWAP_TEST_SEED runs one and tells what happens.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from background import Background, Job
from simulation.model import Pages, page_bytes
from simulation.world import SimulationError, World

# A daemon that is killed leaves calls behind that had not begun.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

SEEDS = int(os.environ.get("INFINISWAP_TEST_SEEDS", "1000"))
SEED = os.environ.get("INFINISWAP_TEST_SEED")
PARTS = 8
PART_S_MAX = 1200
TESTS = Path(__file__).resolve().parents[1]
KINDS = 17
"""Of faults."""


def fail(seed: int, error: str) -> NoReturn:
    pytest.fail(
        f"{error}\nAgain, with a log: INFINISWAP_TEST_SEED={seed} "
        "python -m pytest tests/unit/test_simulation.py",
        pytrace=False,
    )


def run(seed: int, state_dir: Path, is_loud: bool = False) -> World:
    world = World(seed, state_dir, is_loud)
    try:
        world.run()
    except SimulationError as error:
        fail(seed, str(error))
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
        part = item.callspec.params["part"]
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
    assert told["seeds"] == len(seeds(part))
    if told["seeds"] >= 50:
        assert len(told["happened"]) == KINDS, told["happened"]  # each fault, in each part
        assert told["migrated"]


@pytest.mark.skipif(SEED is None, reason="for INFINISWAP_TEST_SEED")
def test_the_seed_that_was_asked_for(tmp_path: Path) -> None:
    world = run(int(SEED or 0), tmp_path, is_loud=True)
    assert sum(device.reads for device in world.devices)


def test_a_seed_replays_exactly(tmp_path: Path) -> None:
    """In this process twice, and in another one whose addresses and hashes differ."""
    some = (3, 4, 5, 6)
    first, second = ([run(seed, tmp_path).loop.trace for seed in some] for _ in range(2))
    assert first == second
    program = (
        "import sys; from pathlib import Path; from simulation.world import World\n"
        "for seed in sys.argv[2:]: print(World(int(seed), Path(sys.argv[1])).run())"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *map(str, some)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert [int(line) for line in other.stdout.split()] == first


def test_another_seed_is_another_world(tmp_path: Path) -> None:
    assert run(3, tmp_path).loop.trace != run(4, tmp_path).loop.trace


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
