# SPDX-License-Identifier: Apache-2.0
"""The Debian package under a systemd, upgraded while a job pages."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import disk_directory, run
from support.jobs import runwatch
from support.machine.ran import ran
from support.machine.wheels import TEST_DEBS

HERE = Path(__file__).parent
TESTS = Path(runwatch.__file__).parents[2]

pytestmark = [
    pytest.mark.full,
    pytest.mark.machine(memory="2G"),
    pytest.mark.needs_debs,
    pytest.mark.requires_tool("busctl", "dbus-daemon", "dpkg", "unshare"),
    pytest.mark.timeout(4000),
]


@pytest.fixture(scope="module")
def seen(pagecheck: Path) -> dict[str, Any]:
    """What was seen of an upgrade; one for all tests."""
    run("modprobe", "ublk_drv")
    directory = disk_directory()
    directory.chmod(0o755)
    job = str(shutil.copy(pagecheck, directory))
    assert TEST_DEBS.is_dir(), "the host could not make packages"
    before, now = (next((TEST_DEBS / kind).glob("*~deb12_*.deb")) for kind in ("before", "now"))
    boot = [sys.executable, str(HERE / "systemd_boot.py")]
    probe = [sys.executable, str(HERE / "deb_probe.py"), "ublk", str(directory), job]
    done = ran(
        *(*boot, *probe, str(before), str(now)),
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        wait_s=3600.0,
    )
    logs = "".join(f"\n{path.name}:\n{path.read_text()}" for path in directory.glob("*.log"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN upgrade ")]
    assert lines, done.stdout + done.stderr + logs
    found: dict[str, Any] = json.loads(lines[0].removeprefix("SEEN upgrade "))
    return found | {"logs": logs}


def test_a_device_keeps_its_process_and_its_code_while_the_package_is_upgraded(
    seen: dict[str, Any],
) -> None:
    old, new = seen["versions"]
    assert old != new
    assert seen["kept"] == sorted([old, new])
    assert (seen["same_process"], seen["device_code"]) == (True, old)


def test_the_daemon_is_restarted_with_its_slabs_lent(seen: dict[str, Any]) -> None:
    assert (seen["daemon_restarted"], seen["daemon_code"]) == (True, seen["versions"][1])
    assert "loses what is lent" not in seen["logs"]


def test_the_package_stays_while_it_is_used(seen: dict[str, Any]) -> None:
    for said in seen["refused"]:
        assert said.startswith("1 ")
        assert "Infiniswap devices are in use as swap space: down." in said


def test_a_restart_moves_the_device_to_the_new_code_and_the_job_pages_on(
    seen: dict[str, Any],
) -> None:
    old, new = seen["versions"]
    assert seen["restarted_code"] == new
    # The unit's first process goes on with the former code.
    assert seen["beside"] == sorted([old, new])
    assert seen["left"] == [new]
    assert seen["device_after"] == seen["device_before"]
    assert "round" in seen["job"]
    assert "wrong" not in seen["job"]
    assert seen["requests_failed"] == 0


def test_a_purge_stops_the_daemon_and_leaves_nothing(seen: dict[str, Any]) -> None:
    assert seen["purged"].startswith("0 ")
    assert seen["left_behind"] == []
