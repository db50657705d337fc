# SPDX-License-Identifier: Apache-2.0
"""All front ends, in the order in which a host prefers them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from infiniswap.device.frontends import fuse, nbd, nbd_socket, ublk
from infiniswap.device.frontends.base import FrontEnd
from infiniswap.device.spec.rundir import DevicePaths, remove_link

FRONT_ENDS: Final[Mapping[str, FrontEnd]] = MappingProxyType(
    {
        front_end.name: front_end
        for front_end in (ublk.FRONT_END, nbd.FRONT_END, fuse.FRONT_END, nbd_socket.FRONT_END)
    }
)
"""By name, the best first: ublk is fastest, fuse promises least under pressure."""


def clear_leftovers(paths: DevicePaths) -> None:
    """Takes away what a killed process of this device left attached, with whatever front end.

    Raises:
        ConflictError: it is still in use: only the user can end that.
    """
    for front_end in FRONT_ENDS.values():
        front_end.clear(paths)
    remove_link(paths.name)


def give_up(paths: DevicePaths) -> tuple[Path, ...]:
    """The block devices that a killed process of this device left, for `swapoff`; what waits for
    that process fails from now on."""
    return tuple(path for front_end in FRONT_ENDS.values() for path in front_end.give_up(paths))
