# SPDX-License-Identifier: Apache-2.0
"""The cgroup of `infiniswap run` on version 2, with systemd and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROBE = [sys.executable, str(HERE / "job_cgroup_probe.py")]


def probe(*prefix: str) -> Any:
    done = subprocess.run(
        [*prefix, *PROBE], capture_output=True, text=True, check=False, timeout=1200
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert (done.returncode, len(lines)) == (0, 1), done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("SEEN "))


def check(seen: Any) -> None:
    """What holds whoever makes it."""
    assert seen["named"]
    assert seen["inside"]
    assert seen["found"]
    assert seen["limit"] == 32 << 20
    assert 12 << 20 <= seen["zswap"] < 13 << 20
    assert seen["killed"]
    assert seen["oom_kills"] == 1
    assert seen["gone"]
    assert seen["others_left"]
    assert seen["own_killed"]
    assert seen["member_gone"]


@pytest.mark.timeout(1800)
def test_without_systemd_it_is_a_directory_at_the_top(vm_kernel: str) -> None:
    seen = probe()
    check(seen)
    assert not seen["systemd"]
    assert seen["file"].startswith("infiniswap-run-")
    assert seen["top"] == seen["member_top"] == "/sys/fs/cgroup"


@pytest.mark.full
@pytest.mark.requires_tool("busctl", "dbus-daemon", "unshare")
@pytest.mark.timeout(1800)
def test_with_systemd_it_is_a_slice_at_the_top(vm_kernel: str) -> None:
    seen = probe(sys.executable, str(HERE / "systemd_boot.py"))
    check(seen)
    assert seen["systemd"]
    assert seen["file"].startswith("infiniswap_run_")
    assert seen["top"] == seen["member_top"] == "/sys/fs/cgroup"
