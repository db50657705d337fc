# SPDX-License-Identifier: Apache-2.0
"""`make bench-rdma` with little of everything, on soft-RoCE that it makes itself. No figure is
judged but that the donor's process has nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.machine(memory="2G"),
    pytest.mark.requires_tool("cmake", "ib_read_lat", "ib_write_bw", "rdma"),
    pytest.mark.timeout(1800),
]


def test_every_comparison_gives_its_figures(project_root: Path) -> None:
    output = Path("/var/tmp/bench-rdma")
    command = [sys.executable, "-m", "isw_bench", "rdma", "--rxe", "--rounds", "1"]
    command += ["--seconds", "0.5", "--slab-sizes", "8M", "--no-install", "--output", str(output)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(project_root / "tools" / "bench")},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    found = json.loads((output / "results.json").read_text())["comparisons"]
    assert list(found) == ["latency", "bandwidth", "map", "device-map", "cpu"]
    for comparison in found.values():
        assert not comparison["skipped"]
        assert comparison["figures"]
        assert all(figure["theirs"]["median"] > 0 for figure in comparison["figures"])
    donors = {side: values["read_donor_s"] for side, values in found["cpu"]["samples"].items()}
    assert donors["RDMA"][0] < donors["TCP"][0] / 10
    # Nothing of it is left.
    for shown in (["rdma", "link"], ["ip", "link"]):
        left = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=60)
        assert "isw-bench" not in left.stdout
