# SPDX-License-Identifier: Apache-2.0
"""What has happened to a device's slabs, for as long as its process lives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SlabCounts:
    """Totals of a device. Each one is exported (infiniswap.device.process.metrics).

    Attributes:
        mapped: slabs that got a donor.
        remapped: of these, those that had lost one.
        moved: slabs that went whole from donor to donor.
        evicted: slabs that donors took back.
        returned: empty ones that were given back.
        lost_pages: pages that had no copy but on donors that are gone.
    """

    mapped: int = 0
    remapped: int = 0
    moved: int = 0
    evicted: int = 0
    returned: int = 0
    lost_pages: int = 0
