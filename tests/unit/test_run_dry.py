# SPDX-License-Identifier: Apache-2.0
"""The text of `run --dry-run`; tests/system/test_run_dry.py has the command."""

from __future__ import annotations

import pytest

from infiniswap.cli.run import dry_run
from infiniswap.device.process.rehearsal import DonorAnswer
from infiniswap.units import MIB


@pytest.mark.parametrize(
    ("joined", "slabs", "words"),
    [
        (False, 1, "1 slab it can lend (64.0 MiB) by tcp"),
        (False, 2, "2 slabs it can lend (128 MiB) by tcp"),
        (True, 1, "1 slab of the device (64.0 MiB) by tcp"),
    ],
)
def test_one_slab_of_a_donor_is_no_plural(joined: bool, slabs: int, words: str) -> None:
    device = dry_run.DevicePlan(
        name="run",
        joined=joined,
        size_bytes=64 * MIB,
        size_why="",
        slab_bytes=64 * MIB,
        slabs=1,
        far_bytes=0,
        far_why="",
        backup=None,
        backup_needs_bytes=0,
        backup_free_bytes=None,
        sealed=True,
        priority=None,
        frontend="",
        frontend_why="",
    )
    donor = DonorAnswer(address="h2:9470", name="h2", slabs=slabs, transport="tcp")
    assert dry_run._donor(device, donor) == f"h2:9470 (h2): {words}"
