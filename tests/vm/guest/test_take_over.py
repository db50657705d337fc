# SPDX-License-Identifier: Apache-2.0
"""Kernel block devices that outlive their process: jobs swap on them meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from pagejob import StartJob
from takeovers import donors_too, kill_again_and_again

from infiniswap.system.process import swap_safety_report

Outlives = Callable[[str], None]


@pytest.fixture
def outlives(cluster: Cluster, job: StartJob, count: Callable[[int, int], int]) -> Outlives:
    """Kills the device's process, donors, and both at once, while a job swaps."""
    return lambda frontend: kill_all(frontend, cluster, job, count)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("frontend", ["ublk"], indirect=True)
def test_no_page_is_wrong_after_each_kill(frontend: str, outlives: Outlives) -> None:
    outlives(frontend)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.kernels("6.12", "6.1")
@pytest.mark.parametrize("frontend", ["nbd"], indirect=True)
def test_no_page_is_wrong_after_each_kill_on_older_kernels_too(
    frontend: str, outlives: Outlives
) -> None:
    outlives(frontend)


def kill_all(
    frontend: str, cluster: Cluster, job: StartJob, count: Callable[[int, int], int]
) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    cluster.donor()
    device = cluster.start("--frontend", frontend, "--swap")
    node = device.path.resolve()
    work = job(10_000)
    work.more_rounds()
    print("pauses in ms:", *kill_again_and_again(device, work, count(2, 20)))
    # A donor's restart alone, and with the device's process.
    restart_donor = donors_too(cluster)
    restart_donor(0)
    work.more_rounds()
    done = device.status["succession"]["take_overs"]
    kill_again_and_again(device, work, count(1, 10), restart_donor, done=done)
    work.finish()
    status = device.status
    assert device.path.resolve() == node
    assert status["stats"]["requests_failed"] == 0
    assert status["slabs"]["mapped"] > 0
    for pid in device.processes().values():  # what a virtual machine's root may do is not refused
        report = swap_safety_report(pid)
        assert report.degraded == (), report
    device.stop()
    assert not device.path.is_symlink()
