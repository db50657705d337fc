# SPDX-License-Identifier: Apache-2.0
"""`make bench-apps` with one small job: it runs, it resumes, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from isw_bench import scope
from isw_bench.apps import plan
from support.benchmarks import work_directory
from support.devices.cluster import NEEDS_SWAP
from support.machine.ran import ran

from infiniswap.system import swap
from infiniswap.system.memory import memory_hierarchy

pytestmark = [*NEEDS_SWAP, pytest.mark.requires_tool("setpriv")]
if importlib.util.find_spec("pandas") is None:
    pytest.skip("needs the demo extra", allow_module_level=True)

JOB = "pandas-join"
WAIT_S = 240.0


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory on disk for runs; nothing may be in it at the end."""
    with work_directory() as directory:
        yield directory


@pytest.fixture
def command(
    project_root: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The smallest job with half of its memory, on infiniswap and on the disk."""
    if swap.active_areas():
        pytest.skip("this host swaps: the benchmark would refuse")
    monkeypatch.setenv("PYTHONPATH", str(project_root / "tools" / "bench"))
    return [
        *(sys.executable, "-m", "isw_bench", "apps", JOB, "--size", "tiny", "--share", "50"),
        *("--rival", plan.OURS, "--rival", plan.DISK, "--no-install"),
        *("--work", str(work), "--output", str(tmp_path)),
    ]


def cells(output: Path) -> list[dict[str, Any]]:
    text = (output / "cells.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.full
def test_a_job_is_measured_and_a_second_run_only_adds_what_is_missing(
    command: list[str], tmp_path: Path
) -> None:
    done = ran(*command, "--rounds", "1", wait_s=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    first = cells(tmp_path)
    assert [line["cell"]["rival"] for line in first] == [plan.UNLIMITED, plan.OURS, plan.DISK]
    assert {line["result"]["status"] for line in first} == {plan.OK}
    for line in first[1:]:
        assert line["result"]["paged"]["in_bytes"] > 0
        assert line["result"]["memory"]["inside_bytes"] <= line["result"]["limit_bytes"]
    ours = first[1]["result"]
    assert ours["busy_s"]["device"] > 0
    assert ours["memory"]["device_bytes"] > 0

    found = json.loads((tmp_path / "results.json").read_text())
    assert found["jobs"][JOB]["shares"]["50"]["rivals"][plan.OURS]["slowdown"]["count"] == 1
    assert "| pandas, db-benchmark join |" in (tmp_path / "results.md").read_text()

    done = ran(*command, "--rounds", "2", wait_s=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    both = cells(tmp_path)
    assert both[:3] == first
    assert [line["cell"]["round"] for line in both] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL]
)
def test_a_run_that_is_ended_leaves_nothing_behind(
    command: list[str], work: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [*command, "--rounds", "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if f"{plan.DISK}, 50 %" in line:
                break
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(WAIT_S) == (130 if number == signal.SIGINT else -number), said
    assert len(cells(tmp_path)) >= 2  # what was finished is kept
    if number == signal.SIGKILL:
        done = ran(*command, "--rounds", "1", wait_s=WAIT_S)  # sweeps, and goes on
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(cells(tmp_path)) == 3
    assert not list(memory_hierarchy().mount_point.glob(f"{scope.PREFIX}*"))
    assert not list(work.iterdir())
