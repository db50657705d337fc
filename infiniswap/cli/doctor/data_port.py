# SPDX-License-Identifier: Apache-2.0
"""Findings about the way that pages take: whether they get to each donor and back, and how fast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from infiniswap.cli.doctor.finding import Finding, degraded, good
from infiniswap.documents import page
from infiniswap.errors import InfiniswapError
from infiniswap.units import GIB, PAGE_BYTES, HostPort
from infiniswap.watch.data_port import DataPortTest, check_data_port

if TYPE_CHECKING:
    from infiniswap.control.client import ClientConfig

_NAME: Final = "data-port"
_SPEED_S: Final = 1.0
_AT_ONCE: Final = 4
"""Each takes a thread, and a donor's ticket is good for seconds. With `speed`: one, as all share
this host's link."""
_DISK_BYTES_PER_S: Final = 125e6
"""A common cloud volume (docs/benchmarks.md)."""


def data_ports(
    addresses: Sequence[HostPort], client: ClientConfig, *, speed: bool
) -> Iterator[Finding]:
    """Tests each donor's data port, and its bandwidth with `speed`."""
    at_once = asyncio.Semaphore(1 if speed else _AT_ONCE)

    async def one(address: HostPort) -> DataPortTest | InfiniswapError | None:
        async with at_once:
            try:
                return await check_data_port(address, client, _SPEED_S if speed else 0.0)
            except InfiniswapError as error:
                return error

    async def every() -> list[DataPortTest | InfiniswapError | None]:
        return await asyncio.gather(*map(one, addresses))

    for address, result in zip(addresses, asyncio.run(every()), strict=True):
        yield from _findings(address, result)


def _findings(
    address: HostPort, result: DataPortTest | InfiniswapError | None
) -> Iterator[Finding]:
    if isinstance(result, InfiniswapError):
        what = f"{result.where or f'donor {address}'}: {result.what}"
        yield degraded(_NAME, what, result.mend or f"see the daemon's log on {address}")
        return
    if result is None:
        yield good(
            _NAME,
            f"{address}: it can be connected to. Whether pages pass was not tested, because that "
            "donor's release is older than this one",
        )
        return
    mtu = f", MTU {result.mtu_bytes}" if result.mtu_bytes else ""
    yield good(
        _NAME,
        f"{address}: pages pass; one comes back in {result.round_trip_s * 1e6:.0f} µs{mtu}",
    )
    if result.in_bytes_per_s is not None and result.out_bytes_per_s is not None:
        yield _speed(address, result.round_trip_s, result.in_bytes_per_s, result.out_bytes_per_s)


def _speed(
    address: HostPort, round_trip_s: float, in_bytes_per_s: float, out_bytes_per_s: float
) -> Finding:
    what = (
        f"{address}: {in_bytes_per_s / 1e6:.0f} MB/s from there, {out_bytes_per_s / 1e6:.0f} MB/s "
        f"to it. Reading 1 GiB back in sequence takes at least {GIB / in_bytes_per_s:.1f} s. A "
        f"program that touches pages at random gets at most {1 / round_trip_s:.0f} a second "
        f"({PAGE_BYTES / round_trip_s / 1e6:.1f} MB/s) for each of its threads"
    )
    if in_bytes_per_s >= _DISK_BYTES_PER_S:
        return good("speed", what)
    return degraded(
        "speed",
        f"{what}. That is less than a common cloud disk reads in sequence (125 MB/s)",
        "connect the hosts by 10 Gbit/s or more, or compare with this host's disk first: "
        f"{page('when-to-use.md')}",
    )
