# SPDX-License-Identifier: Apache-2.0
"""A run's job behind zswap on cgroup version 1, where only the host's figures are known.

Version 2: tests/vm/guest/test_zswap.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP
from support.jobs.runs import Runner
from support.jobs.zswapped import COMPRESSES, PARAMETERS, Job, set_zswap

from infiniswap.system.memory import memory_hierarchy
from infiniswap.units import MIB

LOCAL_MIB, JOB_MIB = 24, 48

pytestmark = NEEDS_SWAP


@pytest.fixture
def on() -> Iterator[None]:
    """zswap is on; at the end it is as it was."""
    if not (PARAMETERS / "enabled").exists():
        pytest.skip("this kernel has no zswap")
    if memory_hierarchy().version != 1:
        pytest.skip("needs cgroup version 1")
    with set_zswap(enabled="Y"):
        yield


def test_zswaps_figures_are_said_to_be_the_hosts_and_it_may_be_switched_off_meanwhile(
    device_runner: Runner, tmp_path: Path, on: None
) -> None:
    job = Job(device_runner, tmp_path / "summary.json", LOCAL_MIB, JOB_MIB, ())
    job.start(COMPRESSES)
    job.rounds(2)
    with set_zswap(enabled="N"):
        before = job.page_outs()
        job.rounds(1)
        assert job.page_outs() > before
    summary, said = job.end()
    zswap = summary["zswap"]
    assert zswap["whose"] == "host"
    assert min(zswap["stored_bytes"], zswap["loaded_bytes"]) > (JOB_MIB - LOCAL_MIB) * MIB / 2
    assert zswap["pool_peak_bytes"] > 0
    assert "zswap (for all programs of this host) took" in said
