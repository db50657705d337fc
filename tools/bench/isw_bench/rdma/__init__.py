# SPDX-License-Identifier: Apache-2.0
"""`make bench-rdma`: our RDMA transport beside perftest, what mapping a slab costs with RDMA, and a
donor's processor time beside TCP."""

from __future__ import annotations

from infiniswap.units import MIB, PAGE_BYTES, parse_page_size
from isw_bench.bench import Settings
from isw_bench.rdma import bandwidth, cpu, device_map, latency, mapping
from isw_bench.rdma.perftest import PEERS
from isw_bench.suite import Option, Suite

_DEPTH_MAX = 256


def _check(settings: Settings) -> str:
    if not 1 <= settings.depth <= _DEPTH_MAX:
        return f"--depth is 1 to {_DEPTH_MAX}"
    if settings.donor_bytes <= 0 or settings.donor_bytes % (4 * 64 * PAGE_BYTES):
        return "--donor-size must be a multiple of 1M"
    if not all(settings.slab_sizes):
        return "--slab-sizes must not be 0"
    if settings.swap_device_bytes <= 0 or settings.swap_device_bytes % (device_map.SLABS * MIB):
        return f"--device-size must be a multiple of {device_map.SLABS}M"
    if settings.address and settings.soft_roce:
        return "--rxe has an address of its own: leave --address out"
    return ""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(parse_page_size, text.split(",")))


SUITE = Suite(
    target="bench-rdma",
    description="Compares our RDMA transport with perftest and with TCP, on this host's RDMA "
    "port or on soft-RoCE (docs/benchmarks.md). Both ends are on this host.",
    comparisons={module.KEY: module for module in (latency, bandwidth, mapping, device_map, cpu)},
    timed=frozenset({latency.KEY, bandwidth.KEY, mapping.KEY, device_map.KEY}),
    packages=PEERS,
    options=(
        Option("--donor-size", "donor_bytes", "64M", "of the donor's store"),
        Option("--depth", "depth", "128", "requests under way, `bandwidth`", int),
        Option(
            "--slab-sizes",
            "slab_sizes",
            "64M,256M,1G",
            "of `map`; those above half of the free memory are left out",
            _sizes,
        ),
        Option(
            "--device-size", "swap_device_bytes", "64M", "of the device of `device-map`, in 8 slabs"
        ),
        Option("--address", "address", "", "of the RDMA port (default: the first of IPv4)", str),
        Option(
            "--rxe",
            "soft_roce",
            "",
            "make soft-RoCE for the run, on an interface of its own that leads nowhere (root)",
            None,
        ),
    ),
    check=_check,
)
