# SPDX-License-Identifier: Apache-2.0
"""This host's devices as rows, for `infiniswap status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from infiniswap.device.api import DonorRow
from infiniswap.device.control import client
from infiniswap.device.spec.rundir import DevicePaths, running_names, stopped_names
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
                "transport": transports(status.donors),
                "swap_used_bytes": status.swap.used_bytes,
                "on_donors_bytes": status.pages_on_donors * PAGE_BYTES,
                "in_donors_bytes": stats["pages_in_remote"] * PAGE_BYTES,
                "in_disk_bytes": stats["pages_in_backup"] * PAGE_BYTES,
                "out_bytes": stats["pages_out"] * PAGE_BYTES,
                "awake": status.awake,
                "errors": sum(stats[key] for key in _ERRORS),
                "alarms": "; ".join(status.alarms),
                "transport_reasons": transport_reasons(status.donors),
                "degraded": status.degraded,
            }
        )
    rows += [{"name": name, "state": "stopped"} for name in stopped_names(run_dir, backup_dir)]
    return rows


def transports(donors: Sequence[DonorRow]) -> dict[str, int]:
    """To how many of them pages go by RDMA and by TCP: {"rdma": 1, "tcp": 1}."""
    counts = Counter(donor.transport for donor in donors if _is_used(donor))
    return dict(sorted(counts.items()))


def transport_reasons(donors: Sequence[DonorRow]) -> dict[str, list[str]]:
    """Why pages do not go by RDMA where that was wished for, each with the donors' addresses."""
    reasons: dict[str, list[str]] = {}
    for donor in donors:
        # Where nothing else than RDMA is wished for, it is why the donor is not used. Of one that
        # was left with TCP it is old.
        if donor.transport_reason and (_is_used(donor) or donor.transport != "tcp"):
            reasons.setdefault(donor.transport_reason, []).append(donor.address)
    return reasons


def _is_used(donor: DonorRow) -> bool:
    return donor.state == "mapped"
