# SPDX-License-Identifier: Apache-2.0
"""This host's devices as rows, for `infiniswap status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from infiniswap.config import TRANSPORT_NAMES
from infiniswap.device.api import DonorRow
from infiniswap.device.control import client
from infiniswap.device.control.frozen import FrozenError
from infiniswap.device.spec.rundir import (
    DevicePaths,
    running_names,
    stopped_names,
    why_not_believed,
)
from infiniswap.errors import InfiniswapError
from infiniswap.units import PAGE_BYTES, counted

_ERRORS = {
    "remote_errors": "failed transfers to or from donors",
    "backup_errors": "failed transfers to or from the backup",
    "crc_errors_remote": "pages that came back from donors with other bytes",
    "crc_errors_backup": "pages that came back from the backup with other bytes",
}


def local_devices(run_dir: Path, backup_dir: Path) -> list[dict[str, object]]:
    """A row for each device, running or stopped; one that does not answer says so."""
    rows: list[dict[str, object]] = []
    for name in running_names(run_dir):
        row: dict[str, object] = {"name": name}
        try:
            status = client.status(DevicePaths(name, run_dir / name, backup_dir))
        except InfiniswapError as error:
            mend = error.mend if isinstance(error, FrozenError) else ""
            rows.append({**row, "state": f"no answer: {error.what}", "mend": mend})
            continue
        stats = status.stats
        slabs = counted(sum(status.slabs.values()), "slab")
        rows.append(
            {
                **row,
                "state": status.state,
                "path": status.path,
                "size_bytes": status.size_bytes,
                "mapped": f"{status.slabs['mapped']} of {slabs}",
                "transport": transports(status.donors),
                "swap_used_bytes": status.swap.used_bytes,
                **({} if status.far is None else {"far_used_bytes": status.far.used_bytes}),
                "on_donors_bytes": status.pages_on_donors * PAGE_BYTES,
                "in_donors_bytes": stats["pages_in_remote"] * PAGE_BYTES,
                "in_disk_bytes": stats["pages_in_backup"] * PAGE_BYTES,
                "out_bytes": stats["pages_out"] * PAGE_BYTES,
                "page_in_us_p50": round(status.page_in_us_p50, 1),
                "page_in_us_p99": round(status.page_in_us_p99, 1),
                "awake": status.awake,
                "sealed": status.sealed,
                "errors": sum(stats[key] for key in _ERRORS),
                "errors_by_kind": {words: stats[key] for key, words in _ERRORS.items()},
                "alarms": "; ".join(status.alarms),
                "transport_reasons": transport_reasons(status.donors),
                "degraded": status.degraded,
            }
        )
    for name in stopped_names(run_dir, backup_dir):
        doubt = why_not_believed(DevicePaths(name, run_dir / name, backup_dir))
        wrong = {} if doubt is None else {"state": doubt.state, "mend": doubt.mend}
        rows.append({"name": name, "state": "stopped", **wrong})
    return rows


def transports(donors: Sequence[DonorRow]) -> dict[str, int]:
    """To how many of them pages travel by each transport: {"rdma": 1, "tcp": 1}."""
    counts = Counter(donor.transport for donor in donors if donor.state == "mapped")
    return dict(sorted(counts.items()))


def transport_reasons(donors: Sequence[DonorRow]) -> dict[str, list[str]]:
    """Why pages do not travel by the best transport, each reason with the donors' addresses."""
    reasons: dict[str, list[str]] = {}
    for donor in donors:
        # A device that may use only one transport does not use the donor for this reason. At a
        # donor that the device fell back for, and no longer uses, the reason is out of date.
        is_current = donor.state == "mapped" or donor.transport != TRANSPORT_NAMES[-1]
        if donor.transport_reason and is_current:
            reasons.setdefault(donor.transport_reason, []).append(donor.address)
    return reasons
