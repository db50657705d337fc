# SPDX-License-Identifier: Apache-2.0
"""Command line: `make bench-rdma BENCH_ARGS="..."`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infiniswap.errors import UsageError
from infiniswap.units import MIB, PAGE_BYTES, parse_page_size
from isw_bench import runner
from isw_bench.bench import Settings
from isw_bench.rdma import bandwidth, cpu, device_map, latency, mapping
from isw_bench.rdma.perftest import PEERS
from isw_bench.runner import Suite

SUITE = Suite(
    target="bench-rdma",
    comparisons={module.KEY: module for module in (latency, bandwidth, mapping, device_map, cpu)},
    timed=frozenset({latency.KEY, bandwidth.KEY, mapping.KEY, device_map.KEY}),
    peers=PEERS,
)
_DEPTH_MAX = 256


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench-rdma BENCH_ARGS=...",
        description="Compares our RDMA transport with perftest and with TCP, on this host's RDMA "
        "port or on soft-RoCE (docs/benchmarks.md). Both ends are on this host.",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each comparison (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement (2)")
    parser.add_argument("--donor-size", default="64M", help="of the donor's store (64M)")
    parser.add_argument(
        "--depth", type=int, default=128, help="requests under way, `bandwidth` (perftest's 128)"
    )
    parser.add_argument(
        "--slab-sizes",
        default="64M,256M,1G",
        help="of `map`; those above half of the free memory are left out (64M,256M,1G)",
    )
    parser.add_argument(
        "--device-size", default="64M", help="of the device of `device-map`, in 8 slabs (64M)"
    )
    parser.add_argument(
        "--address", default="", help="of the RDMA port to use (the first IPv4 address of one)"
    )
    parser.add_argument(
        "--rxe",
        action="store_true",
        help="make soft-RoCE for the run, on an interface of its own that leads nowhere (root)",
    )
    runner.add_options(parser, SUITE, runner.ROOT / "build" / "bench-rdma-results")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Checked settings.

    Raises:
        UsageError: they cannot work.
    """
    settings = Settings(
        rounds=args.rounds,
        seconds=args.seconds,
        swap_bytes=0,
        swap_limit_bytes=0,
        swap_device_bytes=parse_page_size(args.device_size),
        donor_bytes=parse_page_size(args.donor_size),
        quiet_share=args.quiet,
        depth=args.depth,
        slab_sizes=tuple(parse_page_size(size) for size in args.slab_sizes.split(",")),
        address=args.address,
        soft_roce=args.rxe,
    )
    if settings.rounds < 1 or settings.seconds <= 0:
        raise UsageError("--rounds and --seconds must be positive")
    if not 1 <= settings.depth <= _DEPTH_MAX:
        raise UsageError(f"--depth is 1 to {_DEPTH_MAX}")
    if settings.donor_bytes <= 0 or settings.donor_bytes % (4 * 64 * PAGE_BYTES):
        raise UsageError("--donor-size must be a multiple of 1M")
    if not all(settings.slab_sizes):
        raise UsageError("--slab-sizes must not be 0")
    if settings.swap_device_bytes <= 0 or settings.swap_device_bytes % (device_map.SLABS * MIB):
        raise UsageError(f"--device-size must be a multiple of {device_map.SLABS}M")
    if settings.address and settings.soft_roce:
        raise UsageError("--rxe has an address of its own: leave --address out")
    runner.check_names(args, SUITE)
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    return runner.guarded(lambda: runner.run_suite(SUITE, args, settings_of(args)))


if __name__ == "__main__":
    sys.exit(main())
