# SPDX-License-Identifier: Apache-2.0
"""`infiniswap doctor`: says what is there and how to mend what is not; changes nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infiniswap import config as configuration
from infiniswap.cli import doctor


def run_doctor(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infiniswap", "doctor", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_json_names_every_check_with_a_known_state() -> None:
    done = run_doctor("--json")
    findings = json.loads(done.stdout)
    names = [finding["name"] for finding in findings]
    assert {"host", "root", "library", "fuse", "loop", "cap-sys-resource"} <= set(names)
    assert {finding["state"] for finding in findings} <= {"ok", "degraded", "missing"}
    unable = [f for f in findings if f["state"] == "missing"]
    assert done.returncode == (5 if unable else 0), unable
    assert all(finding["mend"] for finding in unable)


def test_an_unreachable_donor_is_a_finding_with_its_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = run_doctor("--donors", f"127.0.0.1:{unused.getsockname()[1]}")
    assert "connection refused" in done.stdout
    assert "infiniswap daemon" in done.stdout


def test_a_backup_directory_in_memory_is_found() -> None:
    done = run_doctor("--json", INFINISWAP_DEVICE_BACKUP_DIR="/dev/shm")
    backup = [f for f in json.loads(done.stdout) if f["name"] == "backup"]
    assert backup[0]["state"] == "missing"
    assert "memory" in backup[0]["what"]
    assert done.returncode == 5


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "_swap_areas", broken)
    config = configuration.load(Path("/dev/null"), environ={})
    findings = list(doctor.examine(config))
    assert [f for f in findings if f.name == "swap" and f.state == doctor.WARN]
    assert [f for f in findings if f.name == "donors"]


def test_nothing_is_changed_by_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_doctor(INFINISWAP_DEVICE_RUN_DIR=str(run), INFINISWAP_DEVICE_BACKUP_DIR=str(tmp_path / "b"))
    assert list(tmp_path.iterdir()) == []
