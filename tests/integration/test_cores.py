# SPDX-License-Identifier: Apache-2.0
"""A device's processes that crash leave no core file, and others do not read their memory.

A core on which somebody insists: tests/vm/guest/test_cores_insisted.py; with each library that
seals: tests/c/test_seal_cores.c.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import WAIT_S, Cluster, Device, wait_ended
from support.devices.nbd_client import connected
from support.devices.seal_keys import KEY_BYTES, key_in_clear
from support.machine.cores import Cores, gathered_cores
from support.machine.process_memory import memory_has

from infiniswap.units import PAGE_BYTES

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_root]

_NOBODY = 65534
_MARKER_BYTES = 32


@pytest.fixture
def cores() -> Iterator[Cores]:
    with gathered_cores() as gathered:
        yield gathered


@pytest.fixture
def device(shared_cluster: Cluster) -> Device:
    """One that has a standby."""
    return shared_cluster.start(
        "--frontend", "nbd-socket", size="8M", INFINISWAP_DEVICE_STANDBY="on"
    )


def test_processes_leave_cores_here(cores: Cores) -> None:
    """So that the tests below can fail."""
    process = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    assert process.wait(WAIT_S) == -signal.SIGABRT
    assert cores.of(process.pid).stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("role", ["active", "standby"])
def test_a_crash_leaves_no_core(
    cores: Cores, device: Device, role: str, number: signal.Signals
) -> None:
    pid = device.processes()[role]
    os.kill(pid, number)
    wait_ended(pid)
    if role == "active":
        device.wait_take_over(1)
    assert not cores.of(pid).exists()
    device.remove()


def test_the_holder_has_the_key_but_not_in_its_memory(device: Device) -> None:
    """A signal from outside does not crash it, so its limit is read."""
    processes, key = device.processes(), key_in_clear(device)
    assert memory_has(processes["active"], key)  # root finds it where pages are sealed
    assert not memory_has(processes["holder"], key)
    limits = Path(f"/proc/{processes['holder']}/limits").read_text()
    assert re.search(r"^Max core file size +1 +1 ", limits, re.MULTILINE)
    device.remove()


def test_a_core_with_every_mapping_would_hold_no_page_and_no_key(device: Device) -> None:
    """As with coredump_filter 0x33, or any other: what is left out is marked in smaps."""
    marker, pid = os.urandom(_MARKER_BYTES), device.pid
    with connected(device.socket) as client:
        for number in range(64):
            page = marker * (PAGE_BYTES // _MARKER_BYTES)
            assert nbd.write(client, number * PAGE_BYTES, page) == 0
        key = key_in_clear(device)
        for secret in (marker, key[: KEY_BYTES // 2], key[KEY_BYTES // 2 :]):
            assert memory_has(pid, secret)
            assert not memory_has(pid, secret, of_a_core=True)
    device.remove()


def test_another_user_reads_no_memory_of_a_device(device: Device) -> None:
    for pid in device.processes().values():
        done = subprocess.run(
            ["cat", f"/proc/{pid}/mem"],
            user=_NOBODY, group=_NOBODY, extra_groups=[], capture_output=True, text=True,
            timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert "Permission denied" in done.stderr
    device.remove()
