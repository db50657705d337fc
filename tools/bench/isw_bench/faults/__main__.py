# SPDX-License-Identifier: Apache-2.0
"""Command line: `make bench-faults BENCH_ARGS="..."`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from infiniswap.errors import UsageError
from infiniswap.units import MIB, parse_page_size
from isw_bench import runner
from isw_bench.bench import Settings
from isw_bench.faults import cache, death, draw, eviction, host, peak, times
from isw_bench.runner import Suite

_SECONDS_MIN = 2.0
_HOST_BYTES_MIN = 256 * MIB

SUITE = Suite(
    target="bench-faults",
    comparisons={module.KEY: module for module in (eviction, death, peak, host, cache, times)},
    timed=frozenset({eviction.KEY, death.KEY, peak.KEY, host.KEY, times.KEY}),
    peers={"redis-benchmark": "redis-tools"},
    draw=draw.draw,
)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench-faults BENCH_ARGS=...",
        description="What evictions, dying donors and a donor's own needs cost.",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison (3)")
    parser.add_argument("--seconds", type=float, default=7.0, help="of one run of a job (7)")
    parser.add_argument("--job-size", default="256M", help="what the consumer's job fills (256M)")
    parser.add_argument("--job-limit", default="128M", help="its memory limit (128M)")
    parser.add_argument("--device-size", default="384M", help="of the consumer's device (384M)")
    parser.add_argument("--slab", default="16M", help="size of a slab (16M)")
    parser.add_argument("--host-memory", default="768M", help="of the lending host (768M)")
    runner.add_options(parser, SUITE, runner.ROOT / "build" / "bench-faults-results")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """Checked settings.

    Raises:
        UsageError: they cannot work.
    """
    settings = Settings(
        rounds=args.rounds,
        seconds=args.seconds,
        swap_bytes=parse_page_size(args.job_size),
        swap_limit_bytes=parse_page_size(args.job_limit),
        swap_device_bytes=parse_page_size(args.device_size),
        quiet_share=args.quiet,
        slab_bytes=parse_page_size(args.slab),
        host_bytes=parse_page_size(args.host_memory),
    )
    if settings.rounds < 1:
        raise UsageError("--rounds must be positive")
    if settings.seconds < _SECONDS_MIN:
        raise UsageError(f"--seconds must be {_SECONDS_MIN:g} or more, or nothing can recover")
    if settings.swap_limit_bytes >= settings.swap_bytes:
        raise UsageError("--job-limit must be less than --job-size, or nothing is swapped")
    if settings.swap_device_bytes < 2 * (settings.swap_bytes - settings.swap_limit_bytes):
        raise UsageError("--device-size must be at least twice of what is swapped")
    if settings.slab_bytes < MIB or settings.swap_device_bytes < 6 * settings.slab_bytes:
        raise UsageError("--slab must be 1M or more, and leave a slab for each of six donors")
    if settings.swap_device_bytes % settings.slab_bytes:
        raise UsageError("--device-size must be a multiple of --slab")
    if settings.host_bytes < _HOST_BYTES_MIN:
        raise UsageError("--host-memory must be 256M or more")
    runner.check_names(args, SUITE)
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    return runner.guarded(lambda: runner.run_suite(SUITE, args, settings_of(args)))


if __name__ == "__main__":
    sys.exit(main())
