# SPDX-License-Identifier: Apache-2.0
"""infiniswap.device.jobs.cost, on made-up processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from support.devices.device_status import device_status
from support.devices.specs import device_spec

from infiniswap import config as configuration
from infiniswap.device.api import FarRow, SuccessionRow
from infiniswap.device.jobs import cost
from infiniswap.units import GIB, MIB


def test_the_memory_of_all_processes_of_a_device_is_summed_up(tmp_path: Path) -> None:
    for pid, mib in ((os.getpid(), 40), (11, 100), (12, 2), (13, 90), (99, 7)):
        (tmp_path / str(pid) / "task" / str(pid)).mkdir(parents=True)
        (tmp_path / str(pid) / "smaps_rollup").write_text(f"Rss: 9 kB\nPss: {mib << 10} kB\n")
    (tmp_path / "12/task/12/children").write_text("13 11 ")
    row = SuccessionRow(holder_pid=12, standby="ready", take_overs=0, reason="", pause_ms=0.0)
    status = device_status(pid=11, succession=row)
    assert cost.measured(status, 5, proc=tmp_path) == cost.Cost(232 * MIB, 256 * MIB, 5)
    far = FarRow(bytes=512 * MIB, used_bytes=0, jobs=1, processes=0)
    having = msgspec.structs.replace(status, far=far)
    assert cost.measured(having, 5, proc=tmp_path) == cost.Cost(232 * MIB, 768 * MIB, 5)
    alone = msgspec.structs.replace(status, succession=None, backup=None)
    assert cost.measured(alone, 0, proc=tmp_path) == cost.Cost(140 * MIB, 0, 0)
    (tmp_path / "11/smaps_rollup").unlink()
    assert cost.measured(status, 0, proc=tmp_path) is None


def test_a_device_takes_more_where_more_is_kept_in_memory() -> None:
    def expected(**device: Any) -> cost.Cost:
        changed = msgspec.structs.replace(
            spec, config=configuration.Config(device=configuration.DeviceConfig(**device))
        )
        return cost.expected(msgspec.structs.replace(changed, size_bytes=4 * GIB))

    spec = device_spec(configuration.Config())
    usual, alone = expected(), expected(standby="off")
    assert (usual.donors_bytes, usual.disk_bytes) == (4 * GIB, 4 * GIB if spec.backup else 0)
    # Measured on Linux 6.18 with Python 3.11: 282 MiB without `infiniswap run` itself.
    assert 290 * MIB < usual.memory_bytes < 350 * MIB
    assert alone.memory_bytes < usual.memory_bytes - 80 * MIB
    spec = msgspec.structs.replace(spec, far_bytes=4 * GIB, backup="/b")
    far = expected()
    assert (far.donors_bytes, far.disk_bytes) == (8 * GIB, 8 * GIB)
    assert far.memory_bytes == usual.memory_bytes + 24 * MIB + 21 * MIB
    spec = device_spec(configuration.Config())
    more = expected(staging_bytes=192 * MIB)
    assert more.memory_bytes == usual.memory_bytes + 128 * MIB
