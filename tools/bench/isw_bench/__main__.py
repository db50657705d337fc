# SPDX-License-Identifier: Apache-2.0
"""Command line of the benchmarks: `make bench BENCH_ARGS="..."`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.system.wakeup import CpuLatencyRequest, idle_host
from infiniswap.units import PAGE_BYTES, parse_page_size
from isw_bench import demo, donor, engine, machine, plot, process, results, swapping
from isw_bench.bench import Bench, Settings, SkipError, build_programs
from isw_bench.results import Comparison
from isw_bench.scope import WORK_DIR, Interrupted, Scope

ROOT = Path(__file__).resolve().parents[3]
COMPARISONS: dict[str, Any] = {
    module.KEY: module for module in (donor, engine, swapping, process, demo)
}
_TIMED = frozenset({donor.KEY, engine.KEY, swapping.KEY})
_INTERRUPTED = 130
_WATCH_S = 2.0
"""How long to look how busy the machine is with other things."""


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="make bench BENCH_ARGS=...",
        description="Compares Infiniswap with its floor, its peers and disks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "comparisons", nargs="*", metavar="NAME", help=f"{', '.join(COMPARISONS)} (default: all)"
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
    parser.add_argument(
        "--quiet",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="before each measurement wait (60 s at most) until others use no more than this "
        "share of the processors (1: do not wait)",
    )
    parser.add_argument(
        "--idle",
        choices=("awake", "host"),
        default="awake",
        help="donor, engine and swap: keep processors awake for both sides alike (awake), or let "
        "them idle as this host does, where only a device of ours keeps them awake (host)",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        metavar="N",
        help="priority of everything that is measured; negative on a machine that others use",
    )
    output = ROOT / "build" / "bench-results"
    parser.add_argument("--output", type=Path, default=output, help=f"directory ({output})")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build" / "bench", help="where to build the programs"
    )
    parser.add_argument(
        "--work", type=Path, default=WORK_DIR, help="disk directory for a run's files"
    )
    parser.add_argument("--no-install", action="store_true", help="do not install missing peers")
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
    unknown = [name for name in args.comparisons if name not in COMPARISONS]
    if unknown:
        raise UsageError(f"there is no comparison {unknown[0]!r}: {', '.join(COMPARISONS)}")
    return settings


def run_one(bench: Bench, key: str, awake: bool) -> Comparison:
    """One comparison. What it needs and this machine has not makes it skipped, not failed."""
    module = COMPARISONS[key]
    bench.commands = {}
    start_s = time.monotonic()
    with processors_awake(awake and key in _TIMED) as note:
        try:
            found: Comparison = module.run(bench)
        except SkipError as error:
            return Comparison(key, module.TITLE, skipped=str(error))
    if key in _TIMED:
        found = replace(found, notes=[*found.notes, note])
    return replace(found, commands=bench.commands, elapsed_s=time.monotonic() - start_s)


@contextlib.contextmanager
def processors_awake(wanted: bool) -> Iterator[str]:
    """For both sides alike, so that they are compared and not what a wake-up costs here; yields
    what to say about it."""
    request = CpuLatencyRequest()
    latency_us = idle_host().latency_us if wanted else None
    try:
        if not wanted:
            yield "Processors idled as this host lets them, but for what a device of ours asks for."
        elif latency_us is None:
            yield "This host's processors cannot be kept from sleeping."
        elif problem := request.hold(latency_us):
            yield f"Not kept awake: {problem}."
        else:
            yield f"Processors were kept awake for all sides (/dev/cpu_dma_latency: {latency_us})."
    finally:
        request.close()


def was_interrupted(error: BaseException) -> bool:
    """Whether it came up while the end after a signal was under way."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, Interrupted):
        cause = cause.__context__
    return cause is not None


def report(comparisons: Sequence[Comparison], about: dict[str, Any], output: Path) -> None:
    """Prints the tables and writes results.json, results.md and results.png."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    for comparison in comparisons:
        table = Table(*results.HEADINGS, title=comparison.title, title_justify="left")
        for figure in comparison.figures:
            table.add_row(*results.cells(figure))
        if comparison.skipped:
            console.print(f"{comparison.title}: not run: {comparison.skipped}", markup=False)
        else:
            console.print(table)
        for note in comparison.notes:
            console.print(f"  {note}", markup=False)
    output.mkdir(parents=True, exist_ok=True)
    data = results.as_json(comparisons, about)
    (output / "results.json").write_text(json.dumps(data, indent=2) + "\n")
    (output / "results.md").write_text(results.markdown(comparisons))
    made = ["results.json", "results.md"]
    caption = f"{about['machine']['processor']}, {about['machine']['processors']} processors"
    if plot.draw(comparisons, output / "results.png", caption):
        made.append("results.png")
    print(f"bench: wrote {', '.join(made)} in {output}")


def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if not args.no_install:
        missing = machine.install_peers()
        if missing:
            print(f"bench: missing, so some comparisons are left out: {', '.join(missing)}")
    print("bench: building the programs", flush=True)
    build_programs(ROOT, args.build)
    about: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["make", "bench", f"BENCH_ARGS={shlex.join(sys.argv[1:])}"]),
        "settings": asdict(settings),
        **machine.describe(ROOT),
        "load_before": machine.load(),
        "busy_before": machine.busy_share(_WATCH_S),
    }
    found: list[Comparison] = []
    failed = ""
    os.nice(args.nice)
    with Scope(args.work) as scope:
        bench = Bench(settings, scope, ROOT, args.build.resolve())
        for key in args.comparisons or COMPARISONS:
            try:
                found.append(run_one(bench, key, args.idle == "awake"))
            except InfiniswapError as error:
                if was_interrupted(error):
                    raise Interrupted(str(error)) from error
                failed = f"{key}: {error}"
                found.append(Comparison(key, COMPARISONS[key].TITLE, skipped=f"failed: {error}"))
    about["load_after"] = machine.load()
    about["busy_after"] = machine.busy_share(_WATCH_S)
    report(found, about, args.output)
    if failed:
        print(f"bench: {failed}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except InfiniswapError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"bench: interrupted{f' ({error})' if str(error) else ''}", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
