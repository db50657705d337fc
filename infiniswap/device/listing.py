# SPDX-License-Identifier: Apache-2.0
"""This host's devices as rows, for `infiniswap status`."""

from __future__ import annotations

from pathlib import Path

from infiniswap.device import client
from infiniswap.device.rundir import DevicePaths, running_names, stopped_names
from infiniswap.errors import InfiniswapError
from infiniswap.units import PAGE_BYTES

_ERRORS = ("remote_errors", "backup_errors", "crc_errors_remote", "crc_errors_backup")


def local_devices(run_dir: Path, backup_dir: Path) -> list[dict[str, object]]:
    """A row for each device, running or stopped; one that does not answer says so."""
    rows: list[dict[str, object]] = []
    for name in running_names(run_dir):
        row: dict[str, object] = {"name": name}
        try:
            status = client.status(DevicePaths(name, run_dir / name, backup_dir))
        except InfiniswapError as error:
            rows.append({**row, "state": f"no answer: {error.what}"})
            continue
        stats = status.stats
        rows.append(
            {
                **row,
                "state": status.state,
                "path": status.path,
                "size_bytes": status.size_bytes,
                "mapped": f"{status.slabs['mapped']} of {sum(status.slabs.values())} slabs",
                "swap_used_bytes": status.swap.used_bytes,
                "in_donors_bytes": stats["pages_in_remote"] * PAGE_BYTES,
                "in_disk_bytes": stats["pages_in_backup"] * PAGE_BYTES,
                "out_bytes": stats["pages_out"] * PAGE_BYTES,
                "awake": status.awake,
                "errors": sum(stats[key] for key in _ERRORS),
                "alarms": "; ".join(status.alarms),
                "degraded": status.degraded,
            }
        )
    rows += [{"name": name, "state": "stopped"} for name in stopped_names(run_dir, backup_dir)]
    return rows
