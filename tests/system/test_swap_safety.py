# SPDX-License-Identifier: Apache-2.0
"""What a device process promises for serving swap, read back from /proc.

Where the host refuses a part of it (CAP_SYS_RESOURCE is missing), that must be named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, Device, until

from infiniswap.system.process import swap_safety_report
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
    pytest.mark.requires_swap,
]

_CAP_SYS_RESOURCE = 24
LOCKED_BYTES_MAX = 512 * MIB
THREADS_MAX = 64


@pytest.fixture
def device(shared_cluster: Cluster) -> Device:
    return shared_cluster.start("--swap", size="64M")


def may_all() -> bool:
    """Whether this test's own root has CAP_SYS_RESOURCE, so that nothing may be degraded."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff:")
    ]
    return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def test_proc_and_status_tell_the_same(device: Device) -> None:
    report = swap_safety_report(device.pid)
    named = {item.split(":")[0] for item in device.status["degraded"]} - {"keep-awake"}
    assert named == {item.name for item in report.degraded}
    if may_all():
        assert named == set()
    shown = device.cluster.ok("device", "show", device.name)
    for name in named:
        assert f"{name}:" in shown
        # What is wrong and what to do, each in words.
        assert "CAP_SYS_RESOURCE" in shown


def test_its_memory_is_locked_and_bounded(device: Device) -> None:
    report = swap_safety_report(device.pid)
    if "memory-lock" in {item.name for item in report.degraded}:
        pytest.skip("needs memory locking (CAP_IPC_LOCK or a higher memlock limit)")
    # Everything resident is locked: nothing of it can be paged out to itself.
    assert report.locked_bytes >= 0.9 * report.resident_bytes
    assert report.locked_bytes < LOCKED_BYTES_MAX
    assert len(report.threads) < THREADS_MAX
    rollup = Path(f"/proc/{device.pid}/smaps_rollup").read_text()
    (swapped,) = [line.split() for line in rollup.splitlines() if line.startswith("Swap:")]
    assert int(swapped[1]) == 0


def test_its_threads_have_small_stacks_and_say_what_they_are(device: Device) -> None:
    report = swap_safety_report(device.pid)
    names = [thread.name for thread in report.threads]
    assert sum(name.startswith("isw-") for name in names) >= 3
    maps = Path(f"/proc/{device.pid}/maps").read_text()
    # A default stack of 8 MiB for each thread would be what most of the locked memory is.
    ranges = [line.split()[0].split("-") for line in maps.splitlines() if len(line.split()) == 5]
    stacks = [int(end, 16) - int(start, 16) for start, end in ranges]
    assert 8 * MIB not in stacks


def test_no_thread_of_the_page_path_takes_signals(device: Device) -> None:
    task = Path(f"/proc/{device.pid}/task")
    for thread in task.iterdir():
        if not (thread / "comm").read_text().startswith("isw-"):
            continue
        (blocked,) = [
            int(line.split()[1], 16)
            for line in (thread / "status").read_text().splitlines()
            if line.startswith("SigBlk:")
        ]
        for number in (2, 15, 10):
            assert blocked >> (number - 1) & 1, (thread.name, number)


def test_serving_makes_no_new_threads(shared_cluster: Cluster) -> None:
    device = shared_cluster.start(size="64M")

    def all_mapped() -> bool:
        write(device, 0)  # those that are not yet have to be busy
        return bool(device.status["slabs"]["mapped"] == 8)

    until(all_mapped, "all slabs mapped")
    write(device, 1)
    until(lambda: device.status["pages_on_donors"], "pages on donors")

    def page_path() -> list[str]:
        threads = swap_safety_report(device.pid).threads
        return sorted(thread.name for thread in threads if thread.name.startswith("isw-"))

    before = page_path()
    for round_ in range(2, 5):
        write(device, round_)
    assert page_path() == before
    device.remove()


def write(device: Device, seed: int) -> None:
    with device.path.open("r+b", buffering=0) as file:
        for _ in range(64):
            assert file.write(bytes([seed]) * MIB) == MIB
        os.fsync(file.fileno())


def test_what_is_refused_is_named(shared_cluster: Cluster) -> None:
    """Without CAP_SYS_RESOURCE and CAP_IPC_LOCK everything still works, and says what it lacks."""
    name = shared_cluster.name()
    drop = [
        "setpriv",
        "--bounding-set=-sys_resource,-ipc_lock",
        "--inh-caps=-sys_resource,-ipc_lock",
    ]
    command = [*drop, "sh", "-c", 'ulimit -l 64; exec "$0" "$@"', sys.executable]
    command += ["-m", "infiniswap", "device", "start", name, "--swap", "--size", "64M"]
    done = subprocess.run(
        [*command, "--donors", shared_cluster.addresses],
        env=shared_cluster.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    device = Device(shared_cluster, name)
    degraded = {item.split(":")[0] for item in device.status["degraded"]} - {"keep-awake"}
    assert {"memory-lock", "oom-score", "io-flusher"} == degraded
    for item in degraded:
        assert f"warning: {item}:" in done.stderr
    assert {item.name for item in swap_safety_report(device.pid).degraded} == degraded
