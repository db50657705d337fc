# SPDX-License-Identifier: Apache-2.0
"""What a job has in its memory is found nowhere outside of it, and where sealing is off it is."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S, Cluster, Device, children, until
from support.jobs.runs import Runner, ready
from support.machine.process_memory import memory_has

from infiniswap.units import MIB, PAGE_BYTES

pytestmark = NEEDS_SWAP

MARKER_BYTES = 32
JOB_BYTES = 128 * MIB
LOCAL = "64M"
_CHUNK_BYTES = 4 * MIB
_ETH_P_ALL = 3

JOB = f"""
import mmap, sys
marker = sys.stdin.buffer.read({MARKER_BYTES})
memory = mmap.mmap(-1, {JOB_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
page = marker * ({PAGE_BYTES} // {MARKER_BYTES})
for _ in range(2):
    for at in range(0, {JOB_BYTES}, {PAGE_BYTES}):
        memory[at : at + {PAGE_BYTES}] = page
    for at in range(0, {JOB_BYTES}, {PAGE_BYTES}):
        assert memory[at : at + {PAGE_BYTES}] == page, at
print("ready", flush=True)
sys.stdin.buffer.read()
for at in range(0, {JOB_BYTES}, {PAGE_BYTES}):
    assert memory[at : at + {PAGE_BYTES}] == page, at
"""
"""A job: the marker comes by its standard input, so that no command line or environment has it."""


class Loopback:
    """Looks at every packet on the loopback interface. A context manager.

    Attributes:
        packets: seen so far.
        found: of them, those with the marker.
    """

    def __init__(self, marker: bytes) -> None:
        self.packets = self.found = 0
        self._marker = marker
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * MIB)
        self._socket.bind(("lo", _ETH_P_ALL))
        self._socket.settimeout(0.1)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="loopback")

    def _look(self) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._socket.recv(1 << 17)
                self.packets += 1
                self.found += self._marker in packet

    def __enter__(self) -> Loopback:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close()


def has(path: Path, marker: bytes) -> bool:
    """Whether a file has it. A page has it 128 times: a border of pieces does not hide it."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if marker in chunk:
                return True
    return False


def kept_files(pid: int) -> Iterator[Path]:
    """What a holder keeps in memory: the state file first of all."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("/memfd:") or target.endswith("/state"):
            yield descriptor


def places_with(marker: bytes, cluster: Cluster, device: Device, loopback: Loopback) -> set[str]:
    """Where it is found, while the job has its memory there."""
    status = device.status
    assert status["stats"]["pages_out"] > JOB_BYTES // PAGE_BYTES // 4
    assert status["pages_on_donors"] > 1000
    holder = status["succession"]["holder_pid"]
    processes = [holder, *children(holder)]
    found = {"loopback"} if loopback.found else set()
    for name, path in (
        ("backup", Path(status["backup"])),
        ("log", device.run / "log"),
        ("record", device.run / "device.json"),
    ):
        assert path.stat().st_size
        found |= {name} if has(path, marker) else set()
    states = list(kept_files(holder))
    assert states
    for path in states:
        found |= {"state"} if has(path, marker) else set()
    for donor in cluster.donors:
        found |= {"donor"} if memory_has(donor.process.pid, marker) else set()
        found |= {"donor's log"} if marker in donor.log.encode() else set()
    for pid in processes:
        for name in ("environ", "cmdline"):
            found |= {name} if has(Path(f"/proc/{pid}/{name}"), marker) else set()
    found |= {"holder"} if memory_has(holder, marker) else set()
    return found


@contextlib.contextmanager
def paging_job(runner: Runner, marker: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """One that has paged, and ends well."""
    options = ("--size", "256M")
    job = runner.popen(
        sys.executable, "-c", JOB, options=options, local=LOCAL, stdin=subprocess.PIPE
    )
    assert job.stdin is not None
    job.stdin.write(marker)
    job.stdin.flush()
    ready(job)
    yield job
    job.stdin.close()
    assert job.wait(WAIT_S) == 0


@pytest.mark.parametrize("seal", ["true", "false"])
def test_a_jobs_memory_is_read_by_nobody_else(cluster: Cluster, seal: str) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.env["INFINISWAP_DEVICE_SEAL"] = seal
    for _ in range(2):
        cluster.donor()
    marker = os.urandom(MARKER_BYTES)
    device = Device(cluster, "run")
    with contextlib.closing(Runner(cluster)) as runner, Loopback(marker) as loopback:
        with paging_job(runner, marker) as job:
            device.wait_standby()
            assert device.status["sealed"] == (seal == "true")
            found = places_with(marker, cluster, device, loopback)
            assert loopback.packets > 1000
            # The search finds what is there: the job itself has it.
            pids = runner.cgroup(job).pids()
            assert any(memory_has(pid, marker) for pid in pids)
        if seal == "true":
            assert not found
            assert not loopback.found
        else:
            assert found >= {"donor", "backup", "loopback", "state"}
            assert not found & {"log", "record", "donor's log", "environ", "cmdline"}


def test_no_process_of_a_device_leaves_a_core(shared_cluster: Cluster) -> None:
    changes = {"INFINISWAP_DEVICE_STANDBY": "on"}
    device = shared_cluster.start("--swap", size="64M", **changes)
    processes = device.processes()
    for role in ("active", "standby"):
        limits = Path(f"/proc/{processes[role]}/limits").read_text()
        assert re.search(r"^Max core file size +1 +1 ", limits, re.MULTILINE), role
        assert int(Path(f"/proc/{processes[role]}/coredump_filter").read_text(), 16) == 0, role
    device.remove()


def test_a_device_without_contents_to_keep_leaves_no_key(shared_cluster: Cluster) -> None:
    device = shared_cluster.start("--swap", size="64M")
    before = until(lambda: device.status, "a device that serves")
    assert before["sealed"]
    device.stop()
    assert not list(shared_cluster.backup_dir.glob("*.key"))
    assert not list(shared_cluster.backup_dir.glob("*.tables"))
    shared_cluster.ok("device", "start", device.name)
    device.remove()
