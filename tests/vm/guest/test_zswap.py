# SPDX-License-Identifier: Apache-2.0
"""A run's job behind zswap, on cgroup version 2: right bytes, and a summary that tells the truth.

Version 1 has figures of the whole host only: tests/system/test_run_zswap.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster
from support.jobs.runs import Runner
from support.jobs.zswapped import COMPRESSES, Job, set_zswap

from infiniswap.units import MIB

pytestmark = [pytest.mark.kernels("6.12", "6.1"), pytest.mark.timeout(1800), pytest.mark.full]

LOCAL_MIB, JOB_MIB = 24, 48


@pytest.fixture
def on() -> Iterator[None]:
    """zswap is on; at the end it is as it was."""
    with set_zswap(enabled="Y"):
        yield


@pytest.fixture
def job(runner: Runner, tmp_path: Path) -> Job:
    options = ("--size", "96M", "--frontend", "fuse")
    return Job(runner, tmp_path / "summary.json", LOCAL_MIB, JOB_MIB, options)


def test_a_job_goes_on_behind_zswap_also_while_that_is_off_and_its_summary_is_true(
    job: Job, on: None
) -> None:
    job.start(COMPRESSES)
    job.rounds(1)
    stored = job.counters()["zswpout"]
    assert stored > (JOB_MIB - LOCAL_MIB) * MIB / 4096 / 2
    with set_zswap(enabled="N"):
        before = job.page_outs()
        job.rounds(1)
        assert job.counters()["zswpout"] == stored
        assert job.page_outs() > before
    job.rounds(1)
    counters = job.counters()
    summary, said = job.end()
    zswap = summary["zswap"]
    assert zswap["whose"] == "job"
    assert zswap["stored_bytes"] >= counters["zswpout"] * 4096 > stored * 4096
    assert zswap["loaded_bytes"] >= counters["zswpin"] * 4096 > 0
    assert 0 < zswap["pool_peak_bytes"] < 0.5 * LOCAL_MIB * MIB
    assert 0.4 < zswap["shrunk_share"] < 0.7
    # What the pool had no room for went to the device, on newer kernels out of the pool.
    assert summary["page_out_bytes"] > 0
    assert (zswap["written_bytes"] or 0) > 0 or "zswpwb" not in counters
    assert "zswap took" in said


def test_a_job_without_a_share_of_zswap_is_not_told_of_it(job: Job, on: None) -> None:
    cgroup = job.start(COMPRESSES)
    (cgroup / "memory.zswap.max").write_text("0")
    job.rounds(1)
    summary, said = job.end()
    assert summary["zswap"] is None
    assert "zswap" not in said
    assert summary["page_out_bytes"] > 0


@pytest.mark.kernels("6.12")  # Linux 6.8 and later have that file
def test_doctor_names_the_switch_that_keeps_pages_from_donors(
    module_cluster: Cluster, on: None
) -> None:
    switch = Path("/sys/fs/cgroup/memory.zswap.writeback")
    before = switch.read_text()
    switch.write_text("0")
    try:
        done = module_cluster.cli("doctor", "--json")
    finally:
        switch.write_text(before)
    (found,) = [one for one in json.loads(done.stdout) if one["name"] == "zswap"]
    assert found["mend"] == f"echo 1 > {switch}"
