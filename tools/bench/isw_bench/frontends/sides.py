# SPDX-License-Identifier: Apache-2.0
"""The block devices that are compared: ours with each front end, and nbdkit behind the kernel's
nbd client and behind nbdfuse."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infiniswap.device.api import SuccessionRow
from infiniswap.device.control import client
from infiniswap.device.frontends import FRONT_ENDS
from infiniswap.errors import InfiniswapError
from infiniswap.system.files import SYS
from infiniswap.system.programs import run_command
from infiniswap.units import MIB
from isw_bench import areas
from isw_bench.bench import START_S, Bench, SkipError, nbdkit_memory, require_programs
from isw_bench.children import Child
from isw_bench.cluster import device

NBDKIT, NBDFUSE = "nbdkit, kernel nbd", "nbdkit, nbdfuse"
SLAB_BYTES = 8 * MIB
_STAGING = "16M"
_CONNECTIONS = "2"


@dataclass(frozen=True, slots=True)
class Side:
    """A block device and the process behind it.

    Attributes:
        kill: kill -9 of that process.
        take_overs: how many successors there were so far; nobody succeeds where it is None.
    """

    name: str
    path: Path
    size_bytes: int
    kill: Callable[[], None]
    take_overs: Callable[[], int] | None = None


def load_drivers() -> None:
    """Loads the kernel's, where it has them as modules: who compares wants all of them there."""
    for name in ("nbd", "ublk_drv", "loop", "fuse"):
        with contextlib.suppress(InfiniswapError):
            run_command(["modprobe", "--quiet", name])


@contextlib.contextmanager
def ours(
    bench: Bench, frontend: str, addresses: Mapping[str, Child], standby: bool = False
) -> Iterator[Side]:
    """A device of ours, every slab mapped.

    Raises:
        SkipError: this host lacks this front end.
    """
    try:
        FRONT_ENDS[frontend].check()
    except InfiniswapError as error:
        raise SkipError(error.what) from error
    changes = {
        "INFINISWAP_DEVICE_STANDBY": "on" if standby else "off",
        "INFINISWAP_DEVICE_STAGING": _STAGING,
    }
    with device(
        bench, addresses, bench.settings.swap_device_bytes, SLAB_BYTES, "--frontend", frontend,
        changes=changes, name=frontend,
    ) as own:  # fmt: skip
        areas.map_all(bench, own)

        def succession() -> tuple[int, SuccessionRow] | None:
            try:
                status = client.status(own.paths)
            except InfiniswapError:
                return None  # there is nobody to ask at the moment
            return (status.pid, status.succession) if status.succession else None

        def kill() -> None:
            def pid() -> int:
                found = succession()
                return found[0] if found and found[1].standby == "ready" else 0

            os.kill(bench.until(pid, "a standby", START_S), signal.SIGKILL)

        def take_overs() -> int:
            found = succession()
            return found[1].take_overs if found else 0

        counts = take_overs if standby else None
        yield Side(frontend, own.path, own.size_bytes, kill, counts)


@contextlib.contextmanager
def nbdkit(bench: Bench) -> Iterator[Side]:
    """`nbdkit memory` over TCP, attached with nbd-client as it comes but for the connections, of
    which there are as many as ours has.

    Raises:
        SkipError: something is missing.
    """
    require_programs("nbdkit", "nbd-client")
    free = next(
        (path for path in sorted((SYS / "block").glob("nbd*")) if not (path / "pid").exists()), None
    )
    if free is None:
        raise SkipError("this kernel has no nbd (modprobe nbd)")
    node = Path("/dev", free.name)
    size_bytes = bench.settings.swap_device_bytes
    with nbdkit_memory(bench, size_bytes, "nbdkit for nbd") as server:
        argv = ["nbd-client", "127.0.0.1", str(server.port), str(node)]
        argv += ["-b", "4096", "-C", _CONNECTIONS]
        bench.run(NBDKIT, argv, START_S)
        try:
            bench.until(lambda: int((free / "size").read_text()) > 0, f"{node}")
            yield Side(NBDKIT, node, size_bytes, lambda: os.kill(server.pid, signal.SIGKILL))
        finally:
            with bench.scope.interrupts.hold():
                run_command(["nbd-client", "-d", str(node)])


@contextlib.contextmanager
def nbdfuse(bench: Bench) -> Iterator[Side]:
    """`nbdkit memory` over TCP behind `nbdfuse` and a loop device. The one that is killed is
    nbdfuse.

    Raises:
        SkipError: something is missing.
    """
    with areas.nbdfuse_loop(bench) as (upper, child):

        def kill() -> None:
            os.kill(child.pid, signal.SIGKILL)
            bench.until(lambda: not child.is_running, "nbdfuse to end")  # then it is unmounted

        yield Side(NBDFUSE, upper.path, bench.settings.swap_device_bytes, kill)
