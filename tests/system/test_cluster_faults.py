# SPDX-License-Identifier: Apache-2.0
"""Random faults in a cluster of nine hosts under verifying workloads: no wrong byte, no error, and
at the end everything is mapped again.

Six hosts lend; of the other three one swaps a job that verifies every page, one runs fio on a
Unix socket, one on a block device. Without more ado as many faults as begin in 30 s; by hand:

    INFINISWAP_TEST_FAULTS=200 make test PYTEST_ARGS="-s tests/system/test_cluster_faults.py"

Each fault is printed, and so is the seed, first; INFINISWAP_TEST_SEED repeats one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netns_cluster import record
from netns_cluster.cluster import Cluster
from support.devices.cluster import LINK_DIR, WAIT_S, until
from support.jobs.fiojob import Fio
from support.jobs.hostfaults import Chaos
from support.jobs.pagejob import NEEDS, Job
from support.machine.netns_hosts import HostedDevice, cluster_of

from infiniswap.system import mounts, swap
from infiniswap.units import CONTROL_PORT, MIB

pytestmark = [
    *NEEDS,
    pytest.mark.requires_netns,
    pytest.mark.requires_tool("ip", "tc", "nsenter", "setsid", "fio"),
    pytest.mark.timeout(7200),
]

SEED = int(os.environ.get("INFINISWAP_TEST_SEED", secrets.randbelow(1 << 32)))
FAULTS = int(os.environ.get("INFINISWAP_TEST_FAULTS", "0"))
BUDGET_S = 30.0
"""Where no count is given."""

DONORS = [f"h{number}" for number in range(1, 7)]
CONSUMERS = ["h7", "h8", "h9"]
FIO_MIB = 32
REMAPPED_S_MAX = 4 * WAIT_S
"""A donor that was lost again and again is not trusted for a while; see policy.placement."""

SETTINGS = {
    "policy.period_s": "0.2",
    "policy.hot_pages_per_s": "1.0",
    "daemon.lease_grace_s": "3.0",
    "cluster.heartbeat_s": "0.4",
    "device.request_ms": "500",
    "device.connect_ms": "1000",
}
NEVER = (
    "requests_failed",
    "crc_errors_remote",
    "crc_errors_backup",
    "backup_errors",
    "backup_failing",
)
TOLD = (
    "pages_in_remote",
    "pages_in_backup",
    "fallback_unmapped",
    "fallback_suspended",
    "fallback_error",
    "fallback_slow",
    "pages_copied",
    "pages_copy_dropped",
    "hedged_reads",
    "hedged_wins",
    "remote_errors",
)


class Device(HostedDevice):
    """A device on a host, on all donors."""

    def __init__(self, cluster: Cluster, host: str, mib: int, *args: str) -> None:
        donors = ",".join(f"{cluster.record.host(one).address}:{CONTROL_PORT}" for one in DONORS)
        options = ("--size", f"{mib}M", "--donors", donors, *args)
        super().__init__(cluster, host, f"{cluster.name}{host}", *options)
        # In order a device takes its log with it.
        self._kept_log = cluster.directory(host) / "device.log"
        self._kept_log.hardlink_to(self.run / "log")

    @property
    def log(self) -> str:
        """What its process has written, also after its end."""
        return self._kept_log.read_text()

    def told(self) -> str:
        """What has become of it, in figures."""
        status, log = self.status, self.log
        figures = {key: status["stats"][key] for key in TOLD if status["stats"][key]}
        figures |= {
            "evictions": status["evictions"],
            "mapped": log.count(": mapped to donor "),
            "back in time": log.count("back with the same lease"),
            "given up": log.count(": given up ("),
        }
        return f"{self.host} {status['frontend']}: {figures}, slabs {status['slabs']}"


class World:
    """The cluster with its workloads."""

    def __init__(self, cluster: Cluster, pagecheck: Path, root: Path, stack: contextlib.ExitStack):
        self.cluster = cluster
        self.swapping = Device(cluster, "h7", 192, "--swap")
        socket = Device(cluster, "h8", FIO_MIB, "--frontend", "nbd-socket")
        block = Device(cluster, "h9", FIO_MIB)
        self.disks = [socket, block]
        self.devices = [self.swapping, *self.disks]
        self.fios: list[Fio] = []
        for device, target in (
            (socket, ["--ioengine=nbd", f"--uri=nbd+unix:///?socket={socket.run / 'nbd.sock'}"]),
            (block, ["--ioengine=libaio", "--direct=1", f"--filename={LINK_DIR / block.name}"]),
        ):
            directory = root / device.host
            directory.mkdir()
            fio = Fio(target, FIO_MIB, 8, directory)
            stack.callback(fio.close)
            self.fios.append(fio)
        self.job = Job(pagecheck, root / "job.log", 0)
        stack.callback(self.job.close)

    def check(self) -> None:
        """Nothing is wrong so far."""
        assert "wrong" not in self.job.log, self.job.log
        assert self.job.process.poll() is None, self.job.log
        for fio in self.fios:
            fio.check()

    def remapped(self) -> bool:
        """Whether no slab that is in use lacks a donor."""
        self.check()
        for device in self.disks:  # all of which is in use
            slabs = device.status["slabs"]
            if slabs["mapped"] != sum(slabs.values()):
                return False
        before = self._homeless_page_ins()
        self.job.more_rounds()
        return self._homeless_page_ins() == before

    def _homeless_page_ins(self) -> int:
        """Of the job, which reads all of its pages in each round."""
        stats = self.swapping.status["stats"]
        return int(stats["fallback_unmapped"] + stats["fallback_suspended"])

    def no_lease(self) -> bool:
        """Whether no donor keeps anything; each must be alive."""
        states = [self.cluster.state(host) for host in DONORS]
        assert all(state.daemon == "serving" for state in states), states
        return not any(
            state.status is None or state.status.leases or state.status.pool.slabs_mapped
            for state in states
        )

    def tails(self) -> str:
        """For whoever has to find out what went wrong."""
        parts = [f"job: {self.job.log[-400:]}"]
        parts += [f"fio: {fio.passes} passes, {fio.error or 'no error'}" for fio in self.fios]
        for device in self.devices:
            with contextlib.suppress(AssertionError, OSError, subprocess.SubprocessError):
                parts.append(f"=== {device.host}: {device.log[-4000:]}")
                parts.append(device.command("show"))
        for host in DONORS:
            log = self.cluster.directory(host) / "daemon.log"
            parts.append(f"=== daemon of {host}: {log.read_text()[-2500:]}")
        return "\n".join(parts)


@pytest.fixture
def nine() -> Iterator[Cluster]:
    """Six donors and three consumers; nothing of it stays."""
    memory_bytes = [192 * MIB] * len(DONORS) + [128 * MIB] * len(CONSUMERS)
    with cluster_of(memory_bytes, 40 * MIB, SETTINGS) as made:
        yield made


def attached(name: str, loops: set[tuple[str, str]]) -> list[str]:
    """What the kernel still has of the cluster's devices; `loops` as of `loop_of`."""
    found = [f"loop device {number}" for number, seq in loops if loop_of(number) == (number, seq)]
    paths = {f"/dev/{number}" for number, _ in loops}
    found += [f"swap {area}" for area in swap.active_areas() if area.path in paths]
    places = (str(record.state_directory(name)), str(record.work_directory(name)))
    found += [f"mount {one}" for one in mounts.mounts() if one.mount_point.startswith(places)]
    with contextlib.suppress(OSError):
        found += [f"link {one}" for one in LINK_DIR.iterdir() if one.name.startswith(name)]
    return found


def loop_of(number: str) -> tuple[str, str]:
    """A loop device in its present use: the kernel counts how often its disk has changed."""
    return number, Path(f"/sys/block/{number}/diskseq").read_text()


def test_random_faults_in_a_cluster_cost_no_byte(
    nine: Cluster, pagecheck: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Always to be seen. Not by capsys, which would keep all the rest to itself even with -s.
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nINFINISWAP_TEST_SEED={SEED}", flush=True)
    with contextlib.ExitStack() as stack:
        world = World(nine, pagecheck, tmp_path, stack)
        named = [LINK_DIR / device.name for device in world.devices]
        loops = {loop_of(link.resolve().name) for link in named if link.exists()}
        assert len(loops) == 2
        chaos = Chaos(nine, DONORS, CONSUMERS, SEED, world.check)
        try:
            world.job.reach("filled")
            begun_s = time.monotonic()
            chaos.run(FAULTS or None, BUDGET_S)
            took_s = time.monotonic() - begun_s
            until(world.remapped, "every slab in use on a donor", REMAPPED_S_MAX)
            ends(world)
        except BaseException:
            print(f"failed: INFINISWAP_TEST_SEED={SEED} INFINISWAP_TEST_FAULTS={chaos.count}")
            print(world.tails())
            raise
    print(f"{chaos.count} faults in {took_s:.0f} s, seed {SEED}")
    assert not attached(nine.name, loops)


def ends(world: World) -> None:
    """Every page is verified once more, everything ends in order, and nobody complains."""
    for fio in world.fios:
        fio.stop()
    world.job.more_rounds()
    for fio in world.fios:
        fio.finish()
    world.job.finish()
    print(f"job: {world.job.rounds} rounds; fio: {[fio.passes for fio in world.fios]} passes")
    for device in world.devices:
        print(device.told())
        stats = device.status["stats"]
        assert not {key: stats[key] for key in NEVER if stats[key]}
        assert device.status["pages_on_donors"] > 0
    for device in world.devices:
        device.command("remove")
    until(world.no_lease, "the end of every lease")
    for host in DONORS + CONSUMERS:
        log = (world.cluster.directory(host) / "daemon.log").read_text()
        assert "Traceback" not in log, f"the daemon of {host}: {log}"
    for device in world.devices:
        assert "Traceback" not in device.log, f"{device.host}: {device.log}"
