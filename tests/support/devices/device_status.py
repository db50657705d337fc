# SPDX-License-Identifier: Apache-2.0
"""A device's status, as its process answers it, made up."""

from __future__ import annotations

from typing import Any

from infiniswap.device.api import DeviceStatus, DonorRow, SwapRow
from infiniswap.units import MIB


def device_status(**changes: Any) -> DeviceStatus:
    """Of a device of `infiniswap run` that serves, with nothing paged yet."""
    values: dict[str, Any] = {
        "name": "run",
        "device_id": "id",
        "pid": 1,
        "uptime_s": 1.0,
        "size_bytes": 256 * MIB,
        "slab_bytes": MIB,
        "frontend": "fuse",
        "path": "/dev/ours",
        "backup": "/b",
        "swap": SwapRow(active=True, priority=100, used_bytes=0),
        "ephemeral": True,
        "state": "serving",
        "slabs": {},
        "pages_on_donors": 0,
        "donors": [],
        "stats": {},
        "remote_share": None,
        "page_in_us_p50": 0.0,
        "page_in_us_p99": 0.0,
        "degraded": [],
        "alarms": [],
        "runs": [1],
    }
    return DeviceStatus(**{**values, **changes})


def donor_row(address: str, name: str, state: str) -> DonorRow:
    """Of a donor that has one slab, from which nothing was read yet."""
    counts: dict[str, Any] = {"slabs": 1, "read_pages": 0, "write_pages": 0, "errors": 0}
    return DonorRow(address=address, name=name, state=state, detail="", **counts)
