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
from support.jobs.zswapped import COMPRESSES, RANDOM, Job, set_zswap

from infiniswap.units import MIB

pytestmark = [pytest.mark.kernels("6.12", "6.1"), pytest.mark.timeout(1800)]

LOCAL_MIB, JOB_MIB = 24, 48


@pytest.fixture
def on() -> Iterator[None]:
    """zswap is on; at the end it is as it was."""
    with set_zswap(enabled="Y"):
        yield


@pytest.fixture
def runner(module_cluster: Cluster) -> Iterator[Runner]:
    own = Runner(module_cluster)
    try:
        yield own
    finally:
        own.close()


@pytest.fixture
def job(runner: Runner, tmp_path: Path) -> Job:
    options = ("--size", "96M", "--frontend", "fuse")
    return Job(runner, tmp_path / "summary.json", LOCAL_MIB, JOB_MIB, options)


def test_pages_that_zswap_keeps_are_the_jobs_and_in_its_summary(job: Job, on: None) -> None:
    job.start(COMPRESSES)
    job.rounds(2)
    summary, said = job.end()
    zswap = summary["zswap"]
    assert zswap["whose"] == "job"
    assert min(zswap["stored_bytes"], zswap["loaded_bytes"]) > (JOB_MIB - LOCAL_MIB) * MIB / 2
    assert 0 < zswap["pool_peak_bytes"] < LOCAL_MIB * MIB
    assert "infiniswap: zswap: took" in said
    assert "of the local memory" in said


def test_zswap_switched_off_and_on_does_not_disturb_the_job(job: Job, on: None) -> None:
    job.start(COMPRESSES)
    job.rounds(1)
    stored = job.counters()["zswpout"]
    with set_zswap(enabled="N"):
        before = job.page_outs()
        job.rounds(2)
        assert job.counters()["zswpout"] == stored
        assert job.page_outs() > before
    job.rounds(1)
    summary, _ = job.end()
    assert summary["zswap"]["stored_bytes"] > stored * 4096
    assert summary["page_out_bytes"] > 0


def test_a_pool_that_is_full_passes_right_bytes_on_to_donors(job: Job, on: None) -> None:
    cgroup = job.start(COMPRESSES)
    (cgroup / "memory.zswap.max").write_text(str(MIB))
    job.rounds(3)
    counters = job.counters()
    summary, said = job.end()
    assert summary["page_in_remote_bytes"] + summary["page_in_staging_bytes"] > 0, said
    assert summary["zswap"]["written_bytes"] == (
        counters["zswpwb"] * 4096 if "zswpwb" in counters else None
    )


def test_a_job_without_a_share_of_zswap_is_not_told_of_it(job: Job, on: None) -> None:
    cgroup = job.start(COMPRESSES)
    (cgroup / "memory.zswap.max").write_text("0")
    job.rounds(1)
    summary, said = job.end()
    assert summary["zswap"] is None
    assert "zswap" not in said
    assert summary["page_out_bytes"] > 0


@pytest.mark.kernels("6.12")  # Linux 6.8 and later
def test_a_job_whose_pages_may_not_leave_zswap_is_told_why_it_was_killed(
    job: Job, on: None
) -> None:
    cgroup = job.start(RANDOM)
    (cgroup / "memory.zswap.writeback").write_text("0")
    summary, said = job.killed()
    assert summary["limit"] == "zswap", said
    assert "memory.zswap.writeback of its cgroup, or of the one above, is 0" in said


@pytest.mark.kernels("6.12")
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
