# SPDX-License-Identifier: Apache-2.0
"""A host that shuts down while a job swaps on a device, both run as systemd services."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import LINK_DIR, disk_directory, run

from infiniswap.system import swap

HERE = Path(__file__).parent
BOUND_S = 1200.0


def serves(frontend: str, node: Path) -> bool:
    """Whether a process stands behind the block device."""
    block = Path("/sys/block", node.name)
    return (block / "pid").exists() if frontend == "nbd" else block.exists()


@pytest.mark.requires_tool("busctl", "dbus-daemon", "unshare")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "frontend", ["ublk", pytest.param("nbd", marks=pytest.mark.full)], indirect=True
)
def test_the_swap_area_goes_before_its_device(frontend: str, pagecheck: Path) -> None:
    directory = disk_directory()
    boot = [sys.executable, str(HERE / "systemd_boot.py"), "--poweroff"]
    boot += [sys.executable, str(HERE / "shutdown_probe.py"), frontend, str(directory)]
    said = directory / "said"
    seen: list[tuple[bool, bool]] = []
    with said.open("w") as output:
        host = subprocess.Popen([*boot, str(pagecheck)], stdout=output, stderr=output)
        try:
            node = None
            end_s = time.monotonic() + BOUND_S
            while host.poll() is None:
                assert time.monotonic() < end_s, said.read_text()
                serving = [line for line in said.read_text().splitlines() if "SERVES" in line]
                if serving and node is None:
                    node = Path(serving[0].split()[1])
                if node is not None:
                    # In this order: an area that is gone by now had a device when it was there.
                    state = (serves(frontend, node), swap.find_area(node) is not None)
                    seen += [state] if state not in seen[-1:] else []
                time.sleep(0.02)
        finally:
            if host.poll() is None:
                host.send_signal(signal.SIGINT)
                host.wait(60)
    logs = "".join(f"\n{path.name}:\n{path.read_text()}" for path in directory.glob("*.log"))
    everything = said.read_text() + logs
    assert host.returncode == 0, everything
    assert node is not None, everything
    assert seen[0] == (True, True), everything
    assert (False, True) not in seen, everything
    assert seen[-1] == (False, False), everything
    assert "swap-device" not in run("dmesg"), run("dmesg")
    # Each service ended by itself, nothing was killed, and it is known what the next start needs.
    assert "Traceback" not in logs
    assert "killed" not in logs.lower(), everything
    assert (directory / "down.backup").exists()
    assert not (LINK_DIR / "down").is_symlink()
