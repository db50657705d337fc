# SPDX-License-Identifier: Apache-2.0
"""A whole host out of memory: init and a shell lie on the device whose process dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import Cluster, Device, run, until

from infiniswap.system import swap
from infiniswap.system.memory import machine_memory
from infiniswap.units import MIB

BEYOND = 160 * MIB
"""What the job needs more than there is."""
LEFT = 256 * MIB
"""What there is: with less to read back, there are more kills in the time."""
KILLS = 5
"""Each takes more than a minute here; test_take_over.py has the many."""
PAGES_BETWEEN = 2000
"""So many pages come in between two kills."""
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE = 2 * MIB

_PROCESS_MADVISE = 440
_MADV_PAGEOUT = 21


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def swapped_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmSwap:"):
            return int(line.split()[1])
    return 0


def swap_out(pid: int) -> bool:
    """Asks for every page of a process that has no file, see process_madvise(2); whether any is
    on a swap area now."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split()
            if "w" not in fields[1] or fields[-1] in ("[vvar]", "[vsyscall]"):
                continue
            begin, end = (int(text, 16) for text in fields[0].split("-"))
            part = _Range(begin, end - begin)
            libc.syscall(_PROCESS_MADVISE, handle, ctypes.byref(part), 1, _MADV_PAGEOUT, 0)
    finally:
        os.close(handle)
    return swapped_kib(pid) > 0


@contextlib.contextmanager
def little_memory() -> Iterator[int]:
    """Leaves little of the host's, bytes: nothing uses or swaps huge pages that are set aside."""
    beyond = machine_memory().available_bytes - LEFT
    HUGE_PAGES.write_text(str(max(0, beyond // HUGE_PAGE)))
    try:
        yield machine_memory().available_bytes
    finally:
        HUGE_PAGES.write_text("0")


@contextlib.contextmanager
def started(argv: list[str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.full  # minutes for each front end
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("frontend", ["ublk", "nbd"], indirect=True)
def test_nobody_that_is_swapped_out_is_needed(
    frontend: str, cluster: Cluster, pagecheck: Path
) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor(pool="64M")
    device = cluster.start("--frontend", frontend, "--swap", size="384M")
    device.wait_standby()
    log = cluster.root / "job.log"
    with little_memory() as available_bytes, log.open("w") as output:
        job_mib = (available_bytes + BEYOND) // MIB
        command = [str(pagecheck), str(job_mib), str(secrets.randbelow(1 << 31)), "0"]
        pipe = subprocess.PIPE
        with (
            started(["sh"], stdin=pipe, stdout=pipe) as shell,
            started(command, stdout=output, stderr=output) as job,
        ):
            until(lambda: "filled" in log.read_text() or job.poll() is not None, "a full memory")
            assert job.poll() is None, log.read_text() + run("dmesg")
            for number in range(1, KILLS + 1):
                kill_beside(device, shell, number)
            # What is wrong stays wrong: a round that began after the last kill finds it.
            seen = log.read_text().count("round")
            until(lambda: log.read_text().count("round") > seen + 1, "a whole round", 1200)
            job.send_signal(signal.SIGTERM)
            assert job.wait(600) == 0, log.read_text()
    assert "wrong" not in log.read_text()
    assert device.status["stats"]["requests_failed"] == 0
    assert "Out of memory" not in run("dmesg")
    device.stop()


def pages_in() -> int:
    """How many pages the kernel has read from swap areas."""
    (line,) = (x for x in Path("/proc/vmstat").read_text().splitlines() if x.startswith("pswpin "))
    return int(line.split()[1])


def kill_beside(device: Device, shell: subprocess.Popen[str], number: int) -> None:
    """Kills the device's process when init and the shell are swapped out to the device."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    processes = device.processes()
    until(lambda: swap_out(1), "init to be swapped out")
    until(lambda: swap_out(shell.pid), "the shell to be swapped out")
    assert swap.used_bytes(device.path.resolve()) > 8 * MIB
    os.kill(processes["active"], signal.SIGKILL)
    device.wait_take_over(number)
    shell.stdin.write(f"echo alive {number}\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == f"alive {number}\n"
    seen = pages_in()
    until(lambda: pages_in() > seen + PAGES_BETWEEN, "pages to come in")
