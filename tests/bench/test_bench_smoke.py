# SPDX-License-Identifier: Apache-2.0
"""Each comparison of `make bench`, with little of everything: it runs, its JSON is sane, and
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

from infiniswap.system import loop

pytestmark = [pytest.mark.requires_root, pytest.mark.requires_native, pytest.mark.timeout(900)]

LITTLE = ("--rounds", "2", "--seconds", "0.1", "--donor-size", "16M", "--no-install")
LITTLE_SWAP = ("--swap-size", "96M", "--swap-limit", "48M", "--swap-device", "128M")
LITTLE_IDLE = ("--idle-seconds", "0.5", "--device-size", "128M")


def command(root: Path, build: Path, work: Path, *args: str) -> list[str]:
    return [
        *(sys.executable, "-m", "isw_bench", *args, *LITTLE, *LITTLE_SWAP, *LITTLE_IDLE),
        *("--build", str(build), "--work", str(work), "--output", str(build / "results")),
    ]


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root / "tools" / "bench")}


def results(project_root: Path, build: Path, work: Path, name: str) -> dict[str, Any]:
    """Runs one comparison and returns its part of the JSON."""
    done = subprocess.run(
        command(project_root, build, work, name),
        env=environment(project_root),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((build / "results" / "results.json").read_text())
    assert data["schema"] == 1
    assert data["machine"]["processors"] >= 1
    assert data["versions"]["infiniswap"]
    found: dict[str, Any] = data["comparisons"][name]
    if found["skipped"]:
        pytest.skip(found["skipped"])
    assert (build / "results" / "results.md").read_text().startswith("### ")
    return found


def check_figures(found: dict[str, Any], rounds: int = 2) -> None:
    assert found["figures"]
    assert found["commands"]
    for figure in found["figures"]:
        for side in ("ours", "theirs", "ratio"):
            assert figure[side]["count"] == rounds, figure
            assert figure[side]["median"] is not None, figure
            assert math.isfinite(figure[side]["median"]), figure
            assert figure[side]["median"] >= 0, figure
        assert figure["verdict"] in ("", "pass", "miss")
    for side in found["samples"].values():
        assert {len(values) for values in side.values()} == {rounds}


@pytest.mark.requires_tool("fio", "nbdkit", "cmake")
def test_donor(project_root: Path, build: Path, work: Path) -> None:
    found = results(project_root, build, work, "donor")
    check_figures(found)
    assert set(found["samples"]) == {"infiniswap", "nbdkit memory"}


@pytest.mark.requires_tool("fio", "nbdkit", "cmake")
def test_engine(project_root: Path, build: Path, work: Path) -> None:
    found = results(project_root, build, work, "engine")
    check_figures(found)
    assert {"infiniswap", "our engine on nbdkit", "ping-pong"} <= set(found["samples"])


@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
@pytest.mark.requires_swap
@pytest.mark.requires_tool("nbdfuse", "nbdkit", "cmake")
def test_swap(project_root: Path, build: Path, work: Path) -> None:
    found = results(project_root, build, work, "swap")
    check_figures(found)
    assert {"infiniswap", "nbdfuse", "FUSE floor", "disk"} <= set(found["samples"])
    for side in found["samples"].values():
        assert min(side["faults"]) > 0


@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_swap
@pytest.mark.requires_tool("cmake")
def test_process(project_root: Path, build: Path, work: Path) -> None:
    found = results(project_root, build, work, "process")
    check_figures(found)
    assert min(found["samples"]["infiniswap"]["threads"]) > 1


@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_swap
@pytest.mark.requires_tool("nbdfuse", "nbdkit", "cmake")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_behind(
    project_root: Path, build: Path, work: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        command(project_root, build, work, "swap"),
        env=environment(project_root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "round 1" in line:
                break
        time.sleep(0.3)  # somewhere in a measurement; where must not matter
        numbers = [int(path.name[4:]) for path in work.glob("*/loop[0-9]*")]
        assert numbers
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(120) == (130 if number == signal.SIGINT else -number), said
    if number == signal.SIGKILL:
        stale = scope.stale_directories(work)
        assert stale  # else nothing was tested
        assert [failure for path in stale for failure in scope.sweep(path)] == []
    assert not list(work.iterdir())
    for device in filter(None, map(loop.loop_device, numbers)):
        # Somebody else may have taken the number; a file system of ours has lost its path.
        assert str(work) not in device.backing
        assert device.backing not in ("/disk", "/nbd")
