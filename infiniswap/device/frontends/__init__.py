# SPDX-License-Identifier: Apache-2.0
"""Front ends: how a device's bytes become a block device, one module for each way.

A front end knows its own part of the kernel and nothing of swap, links or the device's life:
`infiniswap.device.frontends.attach` does that for all of them alike. `choose` is the only place
that knows which there are.
"""

from infiniswap.device.frontends.base import Handover, KernelDevice
from infiniswap.device.frontends.choice import (
    Choice,
    choose,
    clear_leftovers,
    give_up,
    kernel_device,
)

__all__ = [
    "Choice",
    "Handover",
    "KernelDevice",
    "choose",
    "clear_leftovers",
    "give_up",
    "kernel_device",
]
