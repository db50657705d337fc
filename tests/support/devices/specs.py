# SPDX-License-Identifier: Apache-2.0
"""What a device is, as its process knows it."""

from __future__ import annotations

from typing import Any

from infiniswap.config import Config
from infiniswap.device.spec.spec import DeviceSpec


def device_spec(config: Config, **changes: Any) -> DeviceSpec:
    """Device `d`: 4 MiB, no backup, no swap; it ends with nobody."""
    fields: dict[str, Any] = {
        "name": "d",
        "device_id": "00000000-0000-0000-0000-000000000000",
        "size_bytes": 4 << 20,
        "backup": None,
        "backup_owned": False,
        "swap": False,
        "ephemeral": False,
        "owner_pid": None,
    }
    return DeviceSpec(config=config, **{**fields, **changes})
