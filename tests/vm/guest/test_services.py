# SPDX-License-Identifier: Apache-2.0
"""A host whose daemon and device are systemd services: jobs on the device, and a shutdown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import LINK_DIR, disk_directory, run
from support.jobs import runwatch

from infiniswap.system import swap

HERE = Path(__file__).parent
TESTS = Path(runwatch.__file__).parents[2]
BOUND_S = 3600.0

pytestmark = [
    pytest.mark.requires_tool("busctl", "dbus-daemon", "setpriv", "unshare"),
    pytest.mark.timeout(4000),
    pytest.mark.full,  # a quarter of an hour for each front end
]


@dataclass(frozen=True, slots=True)
class Host:
    """One that has been shut down.

    Attributes:
        states: whether the device was served and whether it was swap space, whenever that changed.
        jobs: of root, of the member, and the one with faults: see services_probe.py.
        logs: of the services.
        everything: that was said.
        directory: of backups.
        code: with which it ended.
    """

    states: list[tuple[bool, bool]]
    jobs: dict[str, Any]
    logs: str
    everything: str
    directory: Path
    code: int


def serves(frontend: str, node: Path) -> bool:
    """Whether a process stands behind the block device."""
    block = Path("/sys/block", node.name)
    return (block / {"nbd": "pid", "fuse": "loop", "ublk": ""}[frontend]).exists()


@pytest.fixture(
    scope="module",
    params=["ublk", "nbd", "fuse"],
)
def host(request: pytest.FixtureRequest, pagecheck: Path) -> Host:
    """Boots it, once for all tests; it runs until it has shut itself down."""
    frontend = str(request.param)
    run("modprobe", {"nbd": "nbd", "fuse": "fuse", "ublk": "ublk_drv"}[frontend])
    directory = disk_directory()
    directory.chmod(0o755)  # for a member, who has to execute the job
    job = str(shutil.copy(pagecheck, directory))
    boot = [sys.executable, str(HERE / "systemd_boot.py"), "--poweroff"]
    boot += [sys.executable, str(HERE / "services_probe.py"), frontend, str(directory), job]
    said = directory / "said"
    states: list[tuple[bool, bool]] = []
    with said.open("w") as output:
        process = subprocess.Popen(
            boot, env={**os.environ, "PYTHONPATH": str(TESTS)}, stdout=output, stderr=output
        )
        try:
            node = None
            end_s = time.monotonic() + BOUND_S
            while process.poll() is None:
                assert time.monotonic() < end_s, said.read_text()
                serving = [line for line in said.read_text().splitlines() if "SERVES" in line]
                if serving and node is None:
                    node = Path(serving[0].split()[1])
                if node is not None:
                    # In this order: an area that is gone by now had a device when it was there.
                    state = (serves(frontend, node), swap.find_area(node) is not None)
                    states += [state] if state not in states[-1:] else []
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    logs = "".join(f"\n{path.name}:\n{path.read_text()}" for path in directory.glob("*.log"))
    seen = [line.split(" ", 2) for line in said.read_text().splitlines() if line[:5] == "SEEN "]
    jobs = {who: json.loads(text) for _, who, text in seen}
    everything = said.read_text() + logs
    return Host(states, jobs, logs, everything, directory, process.returncode)


@pytest.mark.parametrize("who", ["root", "member"])
def test_a_job_is_a_slice_at_the_top_and_nothing_is_left_of_it(host: Host, who: str) -> None:
    """The member's begins where a desktop starts its terminals."""
    assert who in host.jobs, host.everything
    seen = host.jobs[who]
    assert (seen["asked_for"] > 0) == (who == "member")
    runwatch.check(seen, uid=seen["asked_for"])
    path = Path(seen["cgroup"])
    assert str(path.parent) == "/sys/fs/cgroup"
    assert path.name.startswith("infiniswap_run_")
    assert seen["below"] == path.name.replace(".slice", ".scope")
    assert seen["units_left"] == []
    assert "ActiveState=active" in seen["device_after"], host.everything
    assert seen["device_after"] == seen["device_before"]


FOUR_CAPABILITIES = f"{1 << 2 | 1 << 19 | 1 << 21 | 1 << 24:016x}"
"""DAC_READ_SEARCH, SYS_PTRACE, SYS_ADMIN, SYS_RESOURCE."""


def test_no_process_has_more_rights_than_it_needs(host: Host) -> None:
    assert "rights" in host.jobs, host.everything
    seen = host.jobs["rights"]
    (daemon,) = seen["infiniswapd.service"]
    caps = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    assert {daemon[name] for name in caps} == {"0" * 16}
    assert "0" not in daemon["Uid"].split()
    assert (daemon["locked"] > 0, daemon["oom_score_adj"]) == (True, -900)
    assert seen["copies"] == {"cluster.secret_file": ["infiniswap-donor", 0o100400]}
    device = seen["infiniswap-device@down.service"]
    assert len(device) >= 3, "starter or holder, active process and standby"
    for process in device:
        assert set(process["Uid"].split()) == {"0"}
        assert {process[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {FOUR_CAPABILITIES}
        assert {process["CapInh"], process["CapAmb"]} == {"0" * 16}
        assert process["oom_score_adj"] == -1000
    for process in (daemon, *device):
        assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2"), process
    # What swap-safety asks of the kernel is granted.
    serving = [process for process in device if process["locked"]]
    assert any(process["real_time"] and process["io_flushers"] for process in serving), device


def test_a_job_swaps_on_whatever_happens_to_the_services(host: Host) -> None:
    """The device's process killed, the daemon restarted with slabs lent, the device restarted."""
    assert "faults" in host.jobs, host.everything
    seen = host.jobs["faults"]
    # To systemd nothing has happened: the unit is its holder's, which restarts.
    assert "NRestarts=0" in seen["device_before"], host.everything
    assert seen["device_after"] == seen["device_before"]
    assert (seen["take_overs"], seen["reason"]) == (2, "restart")
    assert "round" in seen["job"]
    assert "wrong" not in seen["job"]
    assert seen["requests_failed"] == 0


def test_the_units_refuse_nothing_that_swap_safety_needs(host: Host) -> None:
    warnings = [line for line in host.logs.splitlines() if "infiniswap: warning" in line]
    # What fuse cannot do under any unit.
    others = [line for line in warnings if "the fuse front end keeps its promises" not in line]
    assert others == [], host.logs
    assert "loses what is lent" not in host.logs, host.logs


def test_the_swap_area_goes_before_its_device(host: Host) -> None:
    assert host.code == 0, host.everything
    assert host.states[0] == (True, True), host.everything
    assert (False, True) not in host.states, host.everything
    assert host.states[-1] == (False, False), host.everything
    assert "swap-device" not in run("dmesg"), run("dmesg")
    # Each service ended by itself, nothing was killed, and it is known what the next start needs.
    assert "Traceback" not in host.logs
    logs = host.logs.lower().replace("take-over 1: the predecessor has ended (killed)", "")
    assert "killed" not in logs, host.everything
    assert (host.directory / "down.backup").exists()
    assert not (LINK_DIR / "down").is_symlink()
