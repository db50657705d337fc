# SPDX-License-Identifier: Apache-2.0
"""Each comparison of `make bench-faults`, with little of everything: it runs, its JSON is sane, and
nothing is left behind. No figure is judged. One shows in every run that a comparison can be made;
the others take minutes, for full runs."""

from __future__ import annotations

import signal
import time

import pytest
from isw_bench import scope
from support.benchmarks import Runner, check_figures

from infiniswap.system.memory import memory_hierarchy

pytestmark = [
    pytest.mark.requires_root,
    pytest.mark.requires_native,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
    pytest.mark.requires_memcg,
    pytest.mark.requires_swap,
    pytest.mark.requires_tool("cmake"),
    pytest.mark.timeout(900),
]

LITTLE = (
    *("--rounds", "2", "--seconds", "2", "--host-memory", "256M", "--slab", "8M"),
    *("--job-size", "64M", "--job-limit", "32M", "--device-size", "96M"),
)


@pytest.mark.full
@pytest.mark.parametrize("name", ["eviction", "donor-death", "peak", "host", "cache"])
def test_comparison(runner: Runner, name: str) -> None:
    compare(runner, name)


@pytest.mark.full
def test_times(runner: Runner) -> None:
    compare(runner, "times")


def compare(runner: Runner, name: str) -> None:
    """Runs one, with little of everything."""
    found = runner.results("faults", name, *LITTLE)
    check_figures(found)
    for line in found["lines"]:
        assert sum(line["values"]) > 0
        assert line["slice_s"] * len(line["values"]) >= 2


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_behind(runner: Runner, number: signal.Signals) -> None:
    marks: list[str] = []

    def in_the_middle() -> None:
        time.sleep(3.0)  # somewhere in a run; where must not matter
        marks.extend(path.name for path in runner.work.iterdir())

    runner.interrupt(runner.command("faults", "donor-death", *LITTLE), number, in_the_middle)
    assert marks
    for mark in marks:
        assert not list(memory_hierarchy().mount_point.glob(f"{mark}*"))
        assert not scope.marked_processes(mark.removeprefix(scope.PREFIX))
