# SPDX-License-Identifier: Apache-2.0
"""`tools/vm --rxe demo`, its own code: donors and a consumer on machines of their own, made by the
provisioning scripts of vagrant/, and a job that swaps over soft-RoCE between them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from qemu_vm import rxe_results
from qemu_vm.rxe_guest import Job, daemon_pid, demo, provision, this_host, withdraw

from infiniswap.demo.progress import Progress

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Path:
    """The job's; only the consumer takes the time to build it."""
    if not this_host(os.environ).is_consumer:
        return Path("/nowhere")
    return Path(request.getfixturevalue("pagecheck"))


def swap_over_rdma(job: Job, frontend: str) -> None:
    """The demo from its start to its end; nothing of it is left."""
    host, progress = this_host(os.environ), Progress()
    provision(host, progress, FRONTEND=frontend, TRANSPORT="rdma")
    try:
        results = demo(host, progress, job)
    finally:
        withdraw(host)
    if results is None:
        log = Path("/var/log/infiniswapd.log").read_text()
        assert "Traceback" not in log, log
        assert not Path("/proc", str(daemon_pid())).exists()
        return
    print("\n".join(rxe_results.lines(results)))
    assert not rxe_results.problems(results)
    assert results.frontend == frontend
    assert len(results.donors) == len(host.names) - 1
    assert results.summary["page_in_remote_bytes"] > 0


@pytest.mark.full  # two machines, for one test
@pytest.mark.machine(hosts=2)
def test_a_job_swaps_over_rdma_to_another_machine(program: Path) -> None:
    swap_over_rdma(Job(program, mib=28, local_mib=18, idle_s=0), "ublk")


@pytest.mark.full
@pytest.mark.kernels("6.12", "6.1")
@pytest.mark.machine(hosts=3)
def test_a_job_swaps_over_rdma_to_two_machines(program: Path) -> None:
    swap_over_rdma(Job(program), "nbd")
