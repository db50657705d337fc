# SPDX-License-Identifier: Apache-2.0
"""Announcements of donors that are not there."""

from __future__ import annotations

import time
from typing import Any

from msgspec import structs

from infiniswap.discovery.announcement import Announcement, Withdrawal, donor_topic
from infiniswap.units import GIB


def announcement(number: int = 1, **changes: Any) -> Announcement:
    """Of donor h1, h2, ... of the cluster `default`."""
    values: dict[str, Any] = {
        "cluster": "default",
        "donor_id": f"00000000-0000-0000-0000-{number:012x}",
        "session": f"{number:016x}",
        "name": f"h{number}",
        "addresses": [f"10.0.{number // 256}.{number % 256}:9400"],
        "transports": ["tcp", "rdma"],
        "slab_bytes": GIB,
        "protocols": [2],
        "software": "0.1.0",
        "every_s": 60.0,
    }
    return Announcement(**{**values, **changes})


def fresh(made: Announcement) -> Announcement:
    """As it is signed now."""
    now_s = time.time()
    return structs.replace(made, time_s=now_s, sequence=round(now_s * 1e6))


def withdrawn(made: Announcement) -> Withdrawal:
    """The end of its session."""
    return Withdrawal(cluster=made.cluster, donor_id=made.donor_id, session=made.session)


def topic(made: Announcement) -> str:
    """On which it lies."""
    return donor_topic("default", made.donor_id, made.session)
