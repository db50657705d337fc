# SPDX-License-Identifier: Apache-2.0
"""Redis under the client of `make bench-apps`, while it saves."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from isw_bench.apps.jobs import python

SECONDS = 2
WAIT_S = 120.0


@pytest.fixture
def client(project_root: Path) -> str:
    """The benchmark's client of key-value servers, built with or without sanitizers."""
    for build in ("asan", "bench"):
        found = project_root / "build" / build / "bench" / "isw-bench-key-value-load"
        if found.exists():
            return str(found)
    pytest.skip("needs build/asan: make asan")


def test_every_answer_is_right_while_redis_saves(client: str) -> None:
    server = shutil.which("redis-check-rdb")
    if server is None:
        pytest.skip("needs redis-check-rdb, of the package redis-tools")
    argv = python("redis_bgsave.py", server, client, 16, SECONDS)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check = found["check"]
    assert (check["wrong"], check["missing"]) == (0, 0)
    assert check["items"] == check["keys"] == check["keys_in_file"] > 0
    assert found["saves"] >= 1
    assert found["p999_us"] >= found["p99_us"] >= found["p50_us"] > 0
    assert found["ops_per_s"] > 0
