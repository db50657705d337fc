# SPDX-License-Identifier: Apache-2.0
"""A whole host out of memory: init and a shell lie on the device whose process dies."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, run, until

from infiniswap.system import swap
from infiniswap.system.memory import machine_memory
from infiniswap.units import MIB

BEYOND = 96 * MIB
"""What the job needs more than there is."""

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


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("frontend", ["ublk", "nbd"], indirect=True)
def test_nobody_that_is_swapped_out_is_needed(
    frontend: str, cluster: Cluster, pagecheck: Path, count: Callable[[int, int], int]
) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor(pool="64M")
    device = cluster.start("--frontend", frontend, "--swap", size="384M")
    device.wait_standby()
    log = cluster.root / "job.log"
    need = (machine_memory().available_bytes + BEYOND) // MIB
    command = [str(pagecheck), str(need), str(secrets.randbelow(1 << 31)), "0"]
    shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdin is not None
    assert shell.stdout is not None
    with log.open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: "filled" in log.read_text() or job.poll() is not None, "a full memory")
        assert job.poll() is None, log.read_text() + run("dmesg")
        for kill in range(1, count(3, 6) + 1):
            processes = device.processes()
            until(lambda: swap_out(1), "init to be swapped out")
            until(lambda: swap_out(shell.pid), "the shell to be swapped out")
            on_device = swap.used_bytes(device.path.resolve())
            assert on_device > BEYOND // 2
            os.kill(processes["active"], signal.SIGKILL)
            device.wait_take_over(kill)
            shell.stdin.write(f"echo alive {kill}\n")
            shell.stdin.flush()
            assert shell.stdout.readline() == f"alive {kill}\n"
            seen = log.read_text().count("round")
            until(
                lambda seen=seen: log.read_text().count("round") > seen + 1,
                "all of the job's memory to be read",
            )
        job.send_signal(signal.SIGTERM)
        assert job.wait(600) == 0, log.read_text()
        assert "wrong" not in log.read_text()
    finally:
        for process in (job, shell):
            process.kill()
            process.wait()
    assert device.status["stats"]["requests_failed"] == 0
    assert "Out of memory" not in run("dmesg")
    device.stop()
