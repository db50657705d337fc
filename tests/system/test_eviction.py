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
from cluster import SLAB, WAIT_S, Cluster, Donor, until
from pagejob import NEEDS, StartJob

from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.units import MIB

pytestmark = NEEDS

HOST_MIB = 320
HEADROOM_MIB = 96

TAKE = """
import sys, time
input()
held = []
for _ in range(int(sys.argv[1])):  # a MiB at a time; no host fills its headroom in a blink
    held.append(b"x" * 1048576)
    time.sleep(0.004)
print("taken", flush=True)
input()
"""

StartDonor = Callable[[], Donor]


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
    donor = cluster.donor("--memory-cgroup", str(host.path), "--headroom", f"{HEADROOM_MIB}M")
    host.add(donor.process.pid)
    return donor


@pytest.fixture
def application(host: MemoryCgroup) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Starts a program on that host that takes so many MiB within a second or so."""
    started: list[subprocess.Popen[str]] = []

    def start(mib: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKE, str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        host.add(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def slabs_mapped(cluster: Cluster, donor: Donor) -> int:
    text = cluster.ok("status", "--json", "--donors", donor.address)
    return int(json.loads(text)["donors"][0]["status"]["pool"]["slabs_mapped"])


def test_a_host_in_need_gets_its_memory_and_the_job_every_byte(
    cluster: Cluster,
    host: MemoryCgroup,
    squeezed: Donor,
    application: Callable[[int], subprocess.Popen[str]],
    job: StartJob,
) -> None:
    device = cluster.start("--swap", size="128M")
    work = job(0)
    work.reach("filled")
    work.more_rounds()
    until(lambda: slabs_mapped(cluster, squeezed) >= 4, "lent slabs")
    lent = slabs_mapped(cluster, squeezed)

    # More than is left beside what is lent, so some of it has to come back.
    taken_mib = HOST_MIB - HEADROOM_MIB // 4 - lent * SLAB // MIB - 40
    program = application(taken_mib)
    until(lambda: slabs_mapped(cluster, squeezed) < lent, "slabs that came back")
    fewest = slabs_mapped(cluster, squeezed)

    def has_headroom() -> bool:
        memory = host.memory()
        assert memory.available_bytes is not None
        return memory.available_bytes >= HEADROOM_MIB * MIB

    # As the kernel counts it, not as the daemon thinks.
    until(has_headroom, "the host's headroom")
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
