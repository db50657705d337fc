# SPDX-License-Identifier: Apache-2.0
"""A donor whose host needs its memory back, while a job swaps to it.

The host is a memory cgroup: the daemon lives in it and reads its figures.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.devices.cluster import SLAB, WAIT_S, Cluster, Donor, until
from support.jobs.pagejob import NEEDS, StartJob

from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.units import MIB

pytestmark = NEEDS

HOST_MIB = 320
HEADROOM_MIB = 96

TAKE = """
import time
print("ready", flush=True)
held = []
for _ in range(int(input())):  # a MiB at a time; no host fills its headroom in a blink
    held.append(b"x" * 1048576)
    time.sleep(0.004)
print("taken", flush=True)
input()
"""
JOIN = ("sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"')
"""Command that executes another as a part of that host from its first page on."""

StartProgram = Callable[[Callable[[], int]], subprocess.Popen[str]]


@pytest.fixture
def host() -> Iterator[MemoryCgroup]:
    """A host's memory."""
    made = create_memory_cgroup(f"isw-test-{secrets.token_hex(4)}", HOST_MIB * MIB)
    yield made
    made.kill(timeout_s=WAIT_S)
    made.remove()


@pytest.fixture
def squeezed(host: MemoryCgroup, cluster: Cluster) -> Donor:
    """A donor on that host."""
    flags = ("--memory-cgroup", str(host.path), "--headroom", f"{HEADROOM_MIB}M")
    return cluster.donor(*flags, prefix=(*JOIN, str(host.path)))


@pytest.fixture
def application(host: MemoryCgroup) -> Iterator[StartProgram]:
    """Starts a program on that host that takes memory within a second or so: as many MiB as the
    function says once the program itself is there."""
    started: list[subprocess.Popen[str]] = []

    def start(mib: Callable[[], int]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*JOIN, str(host.path), sys.executable, "-c", TAKE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write(f"{mib()}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def pool(cluster: Cluster, donor: Donor) -> dict[str, int]:
    text = cluster.ok("status", "--json", "--donors", donor.address)
    found: dict[str, int] = json.loads(text)["donors"][0]["status"]["pool"]
    return found


def slabs_mapped(cluster: Cluster, donor: Donor) -> int:
    return pool(cluster, donor)["slabs_mapped"]


def available_mib(host: MemoryCgroup) -> int:
    """As the kernel counts it, not as the daemon thinks."""
    available = host.memory().available_bytes
    assert available is not None
    return available // MIB


def test_a_host_in_need_gets_its_memory_and_the_job_every_byte(
    cluster: Cluster,
    host: MemoryCgroup,
    squeezed: Donor,
    application: StartProgram,
    job: StartJob,
) -> None:
    device = cluster.start("--swap", size="128M")
    work = job(0)
    work.reach("filled")
    work.more_rounds()
    until(lambda: slabs_mapped(cluster, squeezed) >= 5, "lent slabs")
    lent = 0

    def too_much() -> int:
        """The headroom is whole again when free slabs and some of those that are lent are gone."""
        nonlocal lent

        def steady() -> tuple[dict[str, int], int] | None:
            slabs, available = pool(cluster, squeezed), available_mib(host)
            return (slabs, available) if slabs == pool(cluster, squeezed) else None

        slabs, available = until(steady, "slabs that nobody is about to map")
        lent = slabs["slabs_mapped"]
        others = slabs["slabs_free"] + slabs["slabs_dirty"]
        # Less than the headroom, so that not the daemon's speed decides whether all is used up.
        missing = min(others + lent - 2, HEADROOM_MIB * 2 // 3 * MIB // SLAB)
        return available - HEADROOM_MIB + missing * SLAB // MIB

    program = application(too_much)
    until(lambda: slabs_mapped(cluster, squeezed) < lent, "slabs that came back")
    fewest = slabs_mapped(cluster, squeezed)
    until(lambda: available_mib(host) >= HEADROOM_MIB, "the host's headroom")
    assert program.poll() is None
    assert host.memory().oom_kills == 0
    work.more_rounds()
    assert device.status["evictions"] > 0
    assert "evicted by donor" in device.log

    # And when the program has ended the slabs are lent again.
    fewest = min(fewest, slabs_mapped(cluster, squeezed))
    program.send_signal(signal.SIGKILL)
    program.wait(WAIT_S)
    until(lambda: slabs_mapped(cluster, squeezed) > fewest, "slabs that are lent again")
    work.more_rounds()
    work.finish()
    stats = device.status["stats"]
    for counter in ("requests_failed", "crc_errors_remote", "crc_errors_backup", "backup_errors"):
        assert stats[counter] == 0, counter
    assert stats["fallback_unmapped"] + stats["fallback_invalid"] > 0
    assert host.memory().oom_kills == 0
