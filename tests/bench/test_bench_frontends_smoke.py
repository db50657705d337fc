# SPDX-License-Identifier: Apache-2.0
"""`make bench-frontends` with little of everything, as far as this host has the front ends. No
figure is judged. (Not part of `make test`: pytest tests/bench.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.requires_root,
    pytest.mark.requires_native,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
    pytest.mark.requires_tool("cmake", "fio", "nbdkit", "nbdfuse"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("name", ["speed", "pause"])
def test_comparison(project_root: Path, build: Path, work: Path, name: str) -> None:
    output = build / "frontends"
    command = [sys.executable, "-m", "isw_bench.frontends", name, "--rounds", "2"]
    command += ["--seconds", "1", "--no-install", "--build", str(build), "--work", str(work)]
    done = subprocess.run(
        [*command, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": str(project_root / "tools" / "bench")},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((output / "results.json").read_text())["comparisons"][name]
    assert not found["skipped"]
    assert all(len(found["samples"]["fuse"][key]) == 2 for key in found["samples"]["fuse"])
    if name == "speed":
        assert {figure["theirs"]["name"] for figure in found["figures"]} >= {"nbdkit, nbdfuse"}
    else:
        assert any("2 × reads fail for good" in note for note in found["notes"])
