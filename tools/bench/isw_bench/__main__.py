# SPDX-License-Identifier: Apache-2.0
"""Command line of the benchmarks: `make bench BENCH_ARGS="..."`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from infiniswap.errors import UsageError
from infiniswap.units import PAGE_BYTES, parse_page_size
from isw_bench import demo, donor, engine, machine, process, runner, swapping
from isw_bench.bench import Settings
from isw_bench.runner import Suite

SUITE = Suite(
    target="bench",
    comparisons={module.KEY: module for module in (donor, engine, swapping, process, demo)},
    timed=frozenset({donor.KEY, engine.KEY, swapping.KEY}),
    peers=machine.PEERS,
)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench BENCH_ARGS=...",
        description="Compares Infiniswap with its floor, its peers and disks.",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each comparison (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement (1)")
    parser.add_argument("--donor-size", default="256M", help="store of the server comparisons")
    parser.add_argument("--swap-size", default="512M", help="what the swapping job fills")
    parser.add_argument("--swap-limit", default="256M", help="its memory limit")
    parser.add_argument("--swap-device", default="1G", help="size of each swap area")
    parser.add_argument("--device-size", default="4G", help="of the device whose memory is read")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="watched per round (20)")
    parser.add_argument("--demo-args", default="", help="options for `infiniswap demo`")
    runner.add_options(parser, SUITE, runner.ROOT / "build" / "bench-results")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Checked settings.

    Raises:
        UsageError: they cannot work.
    """
    settings = Settings(
        rounds=args.rounds,
        seconds=args.seconds,
        donor_bytes=parse_page_size(args.donor_size),
        swap_bytes=parse_page_size(args.swap_size),
        swap_limit_bytes=parse_page_size(args.swap_limit),
        swap_device_bytes=parse_page_size(args.swap_device),
        idle_s=args.idle_seconds,
        process_bytes=parse_page_size(args.device_size),
        demo_args=tuple(shlex.split(args.demo_args)),
        quiet_share=args.quiet,
    )
    if settings.rounds < 1 or settings.seconds <= 0 or settings.idle_s <= 0:
        raise UsageError("--rounds, --seconds and --idle-seconds must be positive")
    if settings.donor_bytes % (4 * 64 * PAGE_BYTES):
        raise UsageError("--donor-size must be a multiple of 1M")
    if settings.swap_limit_bytes >= settings.swap_bytes:
        raise UsageError("--swap-limit must be less than --swap-size, or nothing is swapped")
    if settings.swap_device_bytes < 2 * (settings.swap_bytes - settings.swap_limit_bytes):
        raise UsageError("--swap-device must be at least twice of what is swapped")
    runner.check_names(args, SUITE)
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    return runner.guarded(lambda: runner.run_suite(SUITE, args, settings_of(args)))


if __name__ == "__main__":
    sys.exit(main())
