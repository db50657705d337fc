# SPDX-License-Identifier: Apache-2.0
"""Which front end a device gets on this host, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.device.frontends import fuse, nbd, nbd_socket, ublk
from infiniswap.device.frontends.base import KernelDevice
from infiniswap.device.frontends.fuse import FuseLoop
from infiniswap.device.frontends.nbd import NbdKernel
from infiniswap.device.frontends.nbd_socket import NbdSocket
from infiniswap.device.frontends.ublk import UblkKernel
from infiniswap.device.spec.rundir import DevicePaths, remove_link
from infiniswap.errors import InfiniswapError, NotPermittedError, UsageError


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
    if asked == "nbd-socket":
        if swap_wanted:
            raise UsageError(
                "the nbd-socket front end is no block device, so nothing can swap on it",
                mend="Leave --swap out, or use --frontend fuse.",
            )
        return Choice("nbd-socket", "asked for")
    if lacking := rights.lacking("CAP_SYS_ADMIN"):
        other = "" if swap_wanted else ", or use --frontend nbd-socket: a device without the kernel"
        raise NotPermittedError(
            f"a block device needs {lacking}", mend=f"{rights.way_to(lacking)}{other}."
        )
    if asked in CHECKS:
        CHECKS[asked]()
        return Choice(asked, "asked for")
    return best(CHECKS)


CHECKS: Final[Mapping[str, Callable[[], None]]] = {
    "ublk": ublk.check,
    "nbd": nbd.check,
    "fuse": fuse.check,
}
"""Those of the kernel, the best first: ublk is fastest, fuse promises least under pressure."""


def best(checks: Mapping[str, Callable[[], None]]) -> Choice:
    """The first front end that this host has.

    Args:
        checks: by name, the best first; each raises what is missing.

    Raises:
        InfiniswapError: what the last one lacks, when there is none.
    """
    lacks: list[str] = []
    *others, last = checks
    for name in others:
        try:
            checks[name]()
        except InfiniswapError as error:
            lacks.append(f"no {name}: {error.what}")
        else:
            return Choice(name, "; ".join(lacks) or "the fastest, and the kernel has it")
    checks[last]()
    return Choice(last, "; ".join(lacks))


def kernel_device(frontend: str, paths: DevicePaths) -> KernelDevice:
    """The front end of that name, not attached yet."""
    match frontend:
        case "nbd-socket":
            return NbdSocket(paths)
        case "ublk":
            return UblkKernel(paths)
        case "nbd":
            return NbdKernel(paths)
        case _:
            return FuseLoop(paths)


def clear_leftovers(paths: DevicePaths) -> None:
    """Takes away what a killed process of this device left attached, with whatever front end.

    Raises:
        ConflictError: it is still in use: only the user can end that.
    """
    nbd_socket.clear_leftovers(paths)
    ublk.clear_leftovers(paths)
    nbd.clear_leftovers(paths)
    fuse.clear_leftovers(paths)
    remove_link(paths.name)


def give_up(paths: DevicePaths) -> tuple[Path, ...]:
    """The block devices that a killed process of this device left, for `swapoff`; what waits for
    that process fails from now on."""
    return (*ublk.give_up(paths), *nbd.give_up(paths), *fuse.give_up(paths))
