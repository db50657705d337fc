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
from support.devices.cluster import Cluster
from support.machine.ran import ran

from infiniswap import config as configuration
from infiniswap.cli import doctor
from infiniswap.cli.doctor import swap
from infiniswap.cli.doctor.finding import WARN

COMMAND = (sys.executable, "-m", "infiniswap", "doctor")


def run_doctor(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran(*COMMAND, *args, env={**os.environ, **environment})


def test_json_names_every_check_with_a_known_state() -> None:
    done = run_doctor("--json")
    findings = json.loads(done.stdout)
    names = [finding["name"] for finding in findings]
    assert {"host", "root", "library", "fuse", "loop", "cap-sys-resource"} <= set(names)
    assert {finding["state"] for finding in findings} <= {"ok", "degraded", "missing"}
    unable = [f for f in findings if f["state"] == "missing"]
    assert done.returncode == (5 if unable else 0), unable
    assert all(finding["mend"] for finding in findings if finding["state"] != "ok")


def test_an_unreachable_donor_is_a_finding_with_its_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = run_doctor("--donors", f"127.0.0.1:{unused.getsockname()[1]}")
    assert "connection refused" in done.stdout
    assert "infiniswap daemon" in done.stdout
    assert done.stdout.rstrip().endswith("docs/when-to-use.md")


def test_a_backup_directory_in_memory_is_found() -> None:
    done = run_doctor("--json", INFINISWAP_DEVICE_BACKUP_DIR="/dev/shm")
    backup = [f for f in json.loads(done.stdout) if f["name"] == "backup"]
    assert backup[0]["state"] == "missing"
    assert "memory" in backup[0]["what"]
    assert done.returncode == 5


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(swap, "areas", broken)
    config = configuration.load(Path("/dev/null"), environ={})
    findings = list(doctor.examine(config))
    assert [f for f in findings if f.name == "swap" and f.state == WARN]
    assert [f for f in findings if f.name == "donors"]


def test_a_mistake_in_the_configuration_hides_nothing() -> None:
    done = run_doctor("--json", INFINISWAP_DAEMON_POOOL="1G")
    findings = json.loads(done.stdout)
    assert findings[0]["name"] == "configuration"
    assert findings[0]["state"] == "missing"
    assert "INFINISWAP_DAEMON_POOL" in findings[0]["mend"]
    assert {"host", "backup", "donors"} <= {finding["name"] for finding in findings}
    assert done.returncode == 5


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
def test_any_user_may_ask() -> None:
    done = ran("setpriv", "--reuid", "65534", "--clear-groups", *COMMAND, "--json")
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("needs a checkout that other users may read")
    assert done.stderr == ""
    findings = json.loads(done.stdout)
    assert next(f for f in findings if f["name"] == "root")["mend"] == "sudo infiniswap doctor"
    assert all(finding["mend"] for finding in findings if finding["state"] != "ok")
    assert done.returncode == 5


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
def test_a_device_that_died_is_named_with_the_command_that_works(cluster: Cluster) -> None:
    cluster.donor()
    device = cluster.start(size="32M")

    def found() -> list[tuple[str, str]]:
        done = cluster.cli("doctor", "--json", "--donors", cluster.addresses)
        return [
            (finding["what"], finding["mend"])
            for finding in json.loads(done.stdout)
            if finding["name"] == "leftovers" and device.name in finding["what"]
        ]

    assert not found()
    device.kill()
    ((what, mend),) = found()
    assert "has died" in what
    assert f"infiniswap device remove {device.name}" in mend
    device.remove()
    assert not found()


def test_nothing_is_changed_by_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_doctor(INFINISWAP_DEVICE_RUN_DIR=str(run), INFINISWAP_DEVICE_BACKUP_DIR=str(tmp_path / "b"))
    assert list(tmp_path.iterdir()) == []
