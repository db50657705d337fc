# SPDX-License-Identifier: Apache-2.0
"""Command line: `make bench-frontends BENCH_ARGS="..."`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infiniswap.errors import UsageError
from infiniswap.units import parse_page_size
from isw_bench import runner
from isw_bench.bench import Settings
from isw_bench.frontends import pause, sides, speed
from isw_bench.machine import PEERS
from isw_bench.runner import Suite

SUITE = Suite(
    target="bench-frontends",
    comparisons={module.KEY: module for module in (speed, pause)},
    timed=frozenset({speed.KEY}),
    peers={**PEERS, "nbd-client": "nbd-client"},
)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench-frontends BENCH_ARGS=...",
        description="Compares the front ends ublk, nbd and fuse, as far as this host has them; a "
        "virtual machine of tools/vm has all (docs/benchmarks.md).",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=5, help="of `speed`; kills of `pause` (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement (2)")
    parser.add_argument("--device-size", default="64M", help="of each device (64M)")
    runner.add_options(parser, SUITE, runner.ROOT / "build" / "bench-frontends-results")
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
        quiet_share=args.quiet,
    )
    if settings.rounds < 1 or settings.seconds <= 0:
        raise UsageError("--rounds and --seconds must be positive")
    if settings.swap_device_bytes <= 0 or settings.swap_device_bytes % sides.SLAB_BYTES:
        raise UsageError("--device-size must be a multiple of 8M")
    runner.check_names(args, SUITE)
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    return runner.guarded(lambda: runner.run_suite(SUITE, args, settings_of(args)))


if __name__ == "__main__":
    sys.exit(main())
