# SPDX-License-Identifier: Apache-2.0
"""Each comparison of `make bench-faults`, with little of everything: it runs, its JSON is sane, and
nothing is left behind. No figure is judged. (Not part of `make test`: pytest tests/bench.)"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from isw_bench import scope

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

LITTLE = ("--rounds", "2", "--seconds", "2", "--no-install", "--host-memory", "256M")
LITTLE_JOB = ("--job-size", "64M", "--job-limit", "32M", "--device-size", "96M", "--slab", "8M")


def command(build: Path, work: Path, *args: str) -> list[str]:
    return [
        *(sys.executable, "-m", "isw_bench.faults", *args, *LITTLE, *LITTLE_JOB),
        *("--build", str(build), "--work", str(work), "--output", str(build / "faults")),
    ]


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root / "tools" / "bench")}


def check(found: dict[str, Any]) -> None:
    assert found["figures"]
    assert found["commands"]
    for figure in found["figures"]:
        for side in ("ours", "theirs", "ratio"):
            assert figure[side]["count"] == (1 if "worst round" in figure["name"] else 2), figure
            assert figure[side]["median"] is not None, figure
            assert math.isfinite(figure[side]["median"]), figure
        assert figure["verdict"] in ("", "pass", "miss")
    for line in found["lines"]:
        assert sum(line["values"]) > 0
        assert line["slice_s"] * len(line["values"]) >= 2


@pytest.mark.parametrize("name", ["eviction", "donor-death", "peak", "host", "cache", "times"])
def test_comparison(project_root: Path, build: Path, work: Path, name: str) -> None:
    done = subprocess.run(
        command(build, work, name),
        env=environment(project_root),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((build / "faults" / "results.json").read_text())["comparisons"][name]
    if found["skipped"]:
        pytest.skip(found["skipped"])
    check(found)
    assert (build / "faults" / "results.md").read_text().startswith("### ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_behind(
    project_root: Path, build: Path, work: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        command(build, work, "donor-death"),
        env=environment(project_root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "round 1" in line:
                break
        time.sleep(3.0)  # somewhere in a run; where must not matter
        marks = [path.name for path in work.iterdir()]
        assert marks
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(120) == (130 if number == signal.SIGINT else -number), said
    if number == signal.SIGKILL:
        stale = scope.stale_directories(work)
        assert stale  # else nothing was tested
        assert [failure for path in stale for failure in scope.sweep(path)] == []
    assert not list(work.iterdir())
    for mark in marks:
        assert not list(memory_hierarchy().mount_point.glob(f"{mark}*"))
        assert not scope.marked_processes(mark.removeprefix(scope.PREFIX))
