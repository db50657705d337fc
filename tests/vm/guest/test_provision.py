# SPDX-License-Identifier: Apache-2.0
"""The provisioning scripts of vagrant/ where systemd is the init, as in Vagrant's machines.
(Without it: test_soft_roce.py.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from qemu_vm.rxe_guest import SCRIPTS
from support.devices.cluster import environment

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.requires_tool("busctl", "dbus-daemon", "unshare")
@pytest.mark.timeout(1800)
def test_the_scripts_make_services(pagecheck: Path) -> None:
    probe = ["sh", str(HERE / "provision_probe.sh"), str(SCRIPTS), str(pagecheck)]
    env = environment()
    done = subprocess.run(
        [sys.executable, str(HERE / "systemd_boot.py"), *probe],
        env={**env, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "PROVISIONED" in done.stdout, said
    assert "ok 8192" in done.stdout, said
    assert "slabs, rdma" in done.stdout, said
