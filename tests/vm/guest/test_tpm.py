# SPDX-License-Identifier: Apache-2.0
"""A host with a TPM that the kernel knows, owned as by Debian's udev rule, and a device's unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, disk_directory, run, until
from support.jobs import runwatch

from infiniswap.system.tpm import NODE

HERE = Path(__file__).parent
TESTS = Path(runwatch.__file__).parents[2]
OTHER_USER = 4711

pytestmark = [
    pytest.mark.full,
    pytest.mark.requires_swtpm,
    pytest.mark.requires_tool("busctl", "dbus-daemon", "systemd-run", "unshare"),
    pytest.mark.timeout(1800),
]


@pytest.fixture
def chip(tmp_path: Path) -> Iterator[None]:
    """A software TPM behind the kernel's own driver; only its owner may open it."""
    run("modprobe", "tpm_vtpm_proxy")
    process = subprocess.Popen(
        ["swtpm", "chardev", "--vtpm-proxy", "--tpm2", "--tpmstate", f"dir={tmp_path}"]
    )
    until(Path(NODE).exists, "a TPM")
    os.chown(NODE, OTHER_USER, OTHER_USER)
    os.chmod(NODE, 0o660)
    yield
    process.terminate()
    process.wait(WAIT_S)


def test_a_devices_unit_has_its_host_key_in_the_tpm(vm_kernel: str, chip: None) -> None:
    run("modprobe", "nbd")
    directory = disk_directory()
    boot = [sys.executable, str(HERE / "systemd_boot.py")]
    done = subprocess.run(
        [*boot, sys.executable, str(HERE / "tpm_probe.py"), str(directory)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    seen = json.loads(line.removeprefix("SEEN "))
    assert seen["keys"] == ["host-key.tpm", "kept.key"], said
    assert seen["same"], said
    assert f"{directory}/host-key.tpm: sealed to the TPM" in seen["doctor"], said
    plain = bytes.fromhex(seen["plain"])
    for path in directory.iterdir():
        assert plain not in path.read_bytes()
        assert plain.hex() not in path.read_text(errors="replace")
