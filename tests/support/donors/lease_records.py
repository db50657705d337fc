# SPDX-License-Identifier: Apache-2.0
"""Records of leases that a donor has granted to a device."""

from __future__ import annotations

from typing import Any

from infiniswap.donor.leases import LeaseRecord


def lease_record(lease: int, **changes: Any) -> LeaseRecord:
    """Of 8 slots for device swap0, at epoch 1."""
    fields: dict[str, Any] = {
        "device_id": "00000000-0000-0000-0000-00000000000b",
        "device_name": "swap0",
        "host_name": "consumer",
        "address": "10.0.0.7:41000",
        "slots_max": 8,
        "reclaim": "5" * 32,
        "epoch": 1,
    }
    return LeaseRecord(lease=lease, **{**fields, **changes})
