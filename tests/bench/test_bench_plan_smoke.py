# SPDX-License-Identifier: Apache-2.0
"""`make bench-plan` with one small job: it runs, its JSON is sane, and nothing is left behind. No
figure is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.benchmarks import work_directory
from support.devices.cluster import NEEDS_SWAP
from support.machine.ran import ran

from infiniswap.system import swap

pytestmark = [*NEEDS_SWAP, pytest.mark.full, pytest.mark.timeout(900)]


def test_a_job_is_planned_and_run(
    project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swap.active_areas():
        pytest.skip("this host swaps: the benchmark would refuse")
    monkeypatch.setenv("PYTHONPATH", str(project_root / "tools" / "bench"))
    argv = [sys.executable, "-m", "isw_bench", "plan", "scan", "--size", "tiny", "--no-install"]
    with work_directory() as work:
        done = ran(*argv, "--work", str(work), "--output", str(tmp_path), wait_s=800)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "recommended limit: slowdown off by at most" in done.stdout
    (job,) = json.loads((tmp_path / "score.json").read_text())["jobs"]
    assert [run["local_bytes"] for run in job["runs"]] == sorted(
        (run["local_bytes"] for run in job["runs"]), reverse=True
    )
    assert len(job["whole"]) == len(job["recommended"]) == 5
    assert all(run["exit_code"] == 0 for run in [*job["runs"], *job["whole"]])
    assert (tmp_path / "score.png").stat().st_size > 0
