# SPDX-License-Identifier: Apache-2.0
"""Which front end a device gets on this host, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass

from infiniswap.device.frontends import fuse, nbd_socket
from infiniswap.device.frontends.base import KernelDevice
from infiniswap.device.frontends.fuse import FuseLoop
from infiniswap.device.frontends.nbd_socket import NbdSocket
from infiniswap.device.rundir import DevicePaths, remove_link
from infiniswap.errors import NotPermittedError, UnavailableError, UsageError


@dataclass(frozen=True, slots=True)
class Choice:
    """A front end and why it was taken."""

    frontend: str
    why: str


def choose(asked: str, swap_wanted: bool) -> Choice:
    """The front end to use on this host.

    Raises:
        UnavailableError: none works, or the one asked for does not.
        UsageError: nbd-socket with swap.
        NotPermittedError: not root.
    """
    if asked in ("ublk", "nbd"):
        raise UnavailableError(
            f"this release has no {asked} front end",
            mend="Use --frontend fuse (or auto).",
        )
    if asked == "nbd-socket":
        if swap_wanted:
            raise UsageError(
                "the nbd-socket front end is no block device, so nothing can swap on it",
                mend="Leave --swap out, or use --frontend fuse.",
            )
        return Choice("nbd-socket", "asked for")
    if os.geteuid() != 0:
        raise NotPermittedError(
            "a block device needs root",
            mend="Run it with sudo, or use --frontend nbd-socket for a device without the kernel.",
        )
    fuse.check()
    why = "asked for" if asked == "fuse" else "the only kernel front end of this release"
    return Choice("fuse", why)


def kernel_device(frontend: str, paths: DevicePaths) -> KernelDevice:
    """The front end of that name, not attached yet."""
    return NbdSocket(paths) if frontend == "nbd-socket" else FuseLoop(paths)


def clear_leftovers(paths: DevicePaths) -> None:
    """Takes away what a killed process of this device left attached, with whatever front end.

    Raises:
        ConflictError: it is still in use: only the user can end that.
    """
    nbd_socket.clear_leftovers(paths)
    fuse.clear_leftovers(paths)
    remove_link(paths.name)
