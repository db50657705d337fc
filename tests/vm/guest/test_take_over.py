# SPDX-License-Identifier: Apache-2.0
"""Kernel block devices that outlive their process: jobs swap on them meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.devices.cluster import Cluster
from support.devices.takeovers import donors_too, kill_again_and_again, restart_again_and_again
from support.jobs.pagejob import StartJob

from infiniswap.system.process import swap_safety_report

pytestmark = pytest.mark.timeout(7200)

Count = Callable[[int, int], int]


@pytest.mark.full  # half an hour beside the other tests; test_ublk_succession.py has its parts
@pytest.mark.parametrize("frontend", ["ublk"], indirect=True)
def test_no_page_is_wrong_after_each_kill(
    frontend: str, cluster: Cluster, job: StartJob, count: Count
) -> None:
    kill_all(frontend, cluster, job, count)


@pytest.mark.full
@pytest.mark.kernels("6.12", "6.1")
@pytest.mark.parametrize("frontend", ["nbd"], indirect=True)
def test_no_page_is_wrong_after_each_kill_on_older_kernels_too(
    frontend: str, cluster: Cluster, job: StartJob, count: Count
) -> None:
    kill_all(frontend, cluster, job, count)


def kill_all(frontend: str, cluster: Cluster, job: StartJob, count: Count) -> None:
    """Kills the device's process, a donor, and both at once, while a job swaps, 20 times each."""
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    cluster.donor()
    device = cluster.start("--frontend", frontend, "--swap")
    node = device.path.resolve()
    work = job(10_000)
    work.reach("filled")
    print("pauses in ms:", *kill_again_and_again(device, work, count(1, 20)))
    # A donor's restart alone, and with the device's process.
    restart_donor = donors_too(cluster)
    restart_again_and_again(device, restart_donor, count(1, 20))
    work.more_rounds(0)
    done = device.status["succession"]["take_overs"]
    kill_again_and_again(device, work, count(1, 20), restart_donor, done=done)
    work.finish()  # verifies every page
    status = device.status
    assert status["succession"]["take_overs"] >= 2
    assert device.path.resolve() == node
    assert status["stats"]["requests_failed"] == 0
    assert status["slabs"]["mapped"] > 0
    for pid in device.processes().values():  # what a virtual machine's root may do is not refused
        report = swap_safety_report(pid)
        assert report.degraded == (), report
    device.stop()
    assert not device.path.is_symlink()
