# SPDX-License-Identifier: Apache-2.0
"""Front ends: how a device's bytes become a block device, one module for each way.

A front end knows its own part of the kernel and nothing of swap, links or the device's life:
`attach` does that for all of them alike. Others ask FRONT_ENDS, and name no front end themselves.
"""

from infiniswap.device.frontends.base import KernelDevice, Places
from infiniswap.device.frontends.choice import Choice, choose
from infiniswap.device.frontends.table import FRONT_ENDS, clear_leftovers, give_up

__all__ = [
    "FRONT_ENDS",
    "Choice",
    "KernelDevice",
    "Places",
    "choose",
    "clear_leftovers",
    "give_up",
]
