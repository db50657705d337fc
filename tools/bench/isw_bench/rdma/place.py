# SPDX-License-Identifier: Apache-2.0
"""The RDMA port that all sides use: this host's own, or soft-RoCE made for the run."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infiniswap.engine.native_rdma import rdma_choose, rdma_ports
from infiniswap.engine.rdma import RdmaPort
from infiniswap.errors import EngineError, InfiniswapError
from infiniswap.system.programs import run_command
from isw_bench.bench import START_S, Bench, SkipError, require_programs, require_root

LINK, DEVICE = "isw-bench-rdma", "isw-bench"
ADDRESS = "198.18.77.1"
"""Of RFC 2544's network for benchmarks: no host has it."""

_MTU = "4200"
"""A page fits into one packet of soft-RoCE."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where both ends of every connection are.

    Attributes:
        address: of this host, by which the port is reached.
        device, port: as verbs name it.
        gid_index: of that address; None on InfiniBand.
    """

    address: str
    device: str
    port: int
    gid_index: int | None


@contextlib.contextmanager
def place(bench: Bench) -> Iterator[Place]:
    """The port to use.

    Raises:
        SkipError: there is none.
    """
    with contextlib.ExitStack() as stack:
        if bench.settings.soft_roce:
            stack.enter_context(soft_roce(bench))
            yield found(ADDRESS)
        else:
            yield found(bench.settings.address or first_address(ports()))


def ports() -> Sequence[RdmaPort]:
    """Raises:
    SkipError: this host has no RDMA.
    """
    try:
        return rdma_ports()
    except EngineError as error:
        raise SkipError(f"{error.what} (--rxe makes soft-RoCE for the run)") from error


def first_address(every: Sequence[RdmaPort]) -> str:
    """The first IPv4 address of a RoCE port that is up.

    Raises:
        SkipError: none has one.
    """
    for port in every:
        for gid in port.gids:
            if port.is_active and gid.is_roce_v2 and ipaddress.ip_address(gid.address).version == 4:
                return gid.address
    raise SkipError("no RDMA port that is up has an IPv4 address (--address, or --rxe)")


def found(address: str) -> Place:
    """The port that leads to that address of this host's.

    Raises:
        SkipError: none does.
    """
    try:
        port, own = rdma_choose(address)
    except EngineError as error:
        raise SkipError(error.what) from error
    indexes = [gid.index for gid in port.gids if gid.is_roce_v2 and gid.address == own]
    return Place(address, port.device, port.port, indexes[0] if indexes else None)


@contextlib.contextmanager
def soft_roce(bench: Bench) -> Iterator[None]:
    """A device of the kernel's own over an interface that leads nowhere, for the length of the
    block. (`rdma_rxe` hands packets to an address of this host straight to itself.)

    Raises:
        SkipError: not root, or this kernel lacks soft-RoCE.
    """
    require_root("soft-RoCE")
    require_programs("ip", "rdma", "modprobe")
    try:
        run_command(["modprobe", "-a", "rdma_rxe", "ib_uverbs", "dummy"])
    except InfiniswapError as error:
        raise SkipError(f"this kernel has no soft-RoCE: {error.what}") from error
    _remove()  # a killed run's
    try:
        for argv in (
            ["ip", "link", "add", LINK, "type", "dummy"],
            ["ip", "address", "add", f"{ADDRESS}/32", "dev", LINK],
            ["ip", "link", "set", LINK, "mtu", _MTU, "up"],
            ["rdma", "link", "add", DEVICE, "type", "rxe", "netdev", LINK],
        ):
            bench.run(f"soft-RoCE, {argv[0]} {argv[2]}", argv, START_S)
        bench.until(_leads_here, f"RDMA to {ADDRESS}")
        yield
    finally:
        with bench.scope.interrupts.hold():
            _remove()


def _leads_here() -> bool:
    try:
        rdma_choose(ADDRESS)
    except EngineError:
        return False
    return True


def _remove() -> None:
    """The interface takes the device with it, but only after a while."""
    for argv in (["rdma", "link", "delete", DEVICE], ["ip", "link", "delete", LINK]):
        with contextlib.suppress(InfiniswapError):  # it is not there
            run_command(argv)
