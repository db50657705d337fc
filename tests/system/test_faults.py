# SPDX-License-Identifier: Apache-2.0
"""Random faults under jobs that swap and verify every page: no wrong byte, no error, and at the end
everything is mapped again.

By hand: `INFINISWAP_TEST_FAULTS=200 make test PYTEST_ARGS=tests/system/test_faults.py`; a run that
fails prints its INFINISWAP_TEST_SEED.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from random import Random

import pytest
from support.devices.cluster import Cluster, Device, Donor, until
from support.jobs.pagejob import NEEDS, Job, StartJob

pytestmark = [*NEEDS, pytest.mark.timeout(3600)]

FAULTS = int(os.environ.get("INFINISWAP_TEST_FAULTS", "12"))
SEED = int(os.environ.get("INFINISWAP_TEST_SEED", secrets.randbelow(1 << 32)))
DONORS = 4


class Chaos:
    """Does things to donors, and undoes them."""

    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.donors: list[Donor] = [cluster.donor() for _ in range(DONORS)]
        self.paused: set[int] = set()
        self.drained: set[int] = set()
        self.done: list[str] = []

    def one(self) -> None:
        """One fault, at one donor."""
        number = self.rng.randrange(DONORS)
        fault = self.rng.choice(
            [self.kill, self.restart, self.pause, self.drain, self.drain_and_kill]
        )
        self.done.append(f"{fault.__name__} {number}")
        fault(number)

    def kill(self, number: int) -> None:
        """Gone at once; its successor has an empty store under the same address."""
        donor = self.donors[number]
        self.thaw(number)
        donor.end(signal.SIGKILL)
        self.donors[number] = self.cluster.successor(donor)

    def restart(self, number: int) -> None:
        """In order."""
        donor = self.donors[number]
        self.thaw(number)
        assert donor.end() == 0, donor.log
        self.donors[number] = self.cluster.successor(donor)

    def pause(self, number: int) -> None:
        """It does not answer: for less or more than it takes to give it up."""
        self.donors[number].send(signal.SIGSTOP)
        self.paused.add(number)
        time.sleep(self.rng.choice([0.05, 0.3, 1.0, 4.0]))
        if self.rng.random() < 0.7:
            self.thaw(number)

    def drain(self, number: int) -> None:
        """Begins or ends it."""
        self.thaw(number)
        action = "undrain" if number in self.drained else "drain"
        options = ("--no-wait",) if action == "drain" else ()
        self.cluster.ok("donor", action, *options, self.donors[number].address)
        self.drained ^= {number}

    def drain_and_kill(self, number: int) -> None:
        """In the middle of giving its slabs back."""
        self.drain(number)
        self.kill(number)

    def thaw(self, number: int) -> None:
        """Ends a pause."""
        self.donors[number].send(signal.SIGCONT)
        self.paused.discard(number)

    def heal(self) -> None:
        """All donors well again."""
        for number in list(self.paused):
            self.thaw(number)
        for number in list(self.drained):
            self.drain(number)


def well(device: Device) -> bool:
    """Nothing suspended or on its way, and pages on donors."""
    status = device.status
    slabs = status["slabs"]
    return not slabs["suspended"] and not slabs["draining"] and status["pages_on_donors"] > 0


def test_random_faults_cost_no_byte(
    cluster: Cluster, job: Callable[[int], Job] | StartJob, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.env["INFINISWAP_CLUSTER_HEARTBEAT_S"] = "0.4"
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "3"
    cluster.env["INFINISWAP_DEVICE_REQUEST_MS"] = "400"
    cluster.env["INFINISWAP_DEVICE_CONNECT_MS"] = "1000"
    rng = Random(SEED)
    chaos = Chaos(cluster, rng)
    device = cluster.start("--swap", size="192M")
    work = job(0)
    work.reach("filled")
    try:
        for _ in range(FAULTS):
            chaos.one()
            time.sleep(rng.random())
            assert "wrong" not in work.log
            assert work.process.poll() is None, work.log
        chaos.heal()
        work.more_rounds()
        until(lambda: well(device), "everything to be mapped again")
        work.more_rounds()
        work.finish()
    except BaseException:
        with capsys.disabled():
            print(f"\nINFINISWAP_TEST_SEED={SEED} INFINISWAP_TEST_FAULTS={FAULTS}: {chaos.done}")
            print(device.command("show").stdout, device.log[-6000:])
        raise
    stats = device.status["stats"]
    for counter in ("requests_failed", "crc_errors_remote", "crc_errors_backup", "backup_errors"):
        assert stats[counter] == 0, (counter, stats[counter], f"INFINISWAP_TEST_SEED={SEED}")
    device.stop()
