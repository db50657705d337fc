# SPDX-License-Identifier: Apache-2.0
"""A set of comparisons with one command line: its options, its rounds, its report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.system.interrupts import Interrupted
from infiniswap.system.keep_awake import CpuLatencyRequest, idle_host
from infiniswap.units import parse_page_size
from isw_bench import machine, ratio_plot, results
from isw_bench.bench import Bench, Settings, SkipError, build_programs
from isw_bench.exits import exit_code
from isw_bench.results import Comparison
from isw_bench.scope import WORK_DIR, Scope

ROOT = Path(__file__).resolve().parents[3]
_WATCH_S = 2.0
"""How long to look how busy the machine is with other things."""

Draw = Callable[[Sequence[Comparison], Path, str], bool]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of one suite, and what of Settings it gives.

    Attributes:
        flag: such as "--job-size".
        field: of Settings.
        default: as typed.
        help: for --help.
        parse: makes the value of what was typed; None: a switch.
    """

    flag: str
    field: str
    default: str
    help: str
    parse: Callable[[str], Any] | None = parse_page_size


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of comparisons with one command line.

    Attributes:
        target: of make.
        description: for --help.
        comparisons: modules (KEY, TITLE, run) by key, in their order.
        timed: keys for which processors are kept awake.
        packages: by program, see machine.install_peers.
        options: of this suite alone.
        check: refuses settings that cannot work, by a sentence; "" when they can.
        rounds: unless chosen.
        seconds: of one measurement, unless chosen.
        draw: makes the plot.
    """

    target: str
    description: str
    comparisons: Mapping[str, Any]
    timed: Collection[str]
    packages: Mapping[str, str]
    options: Sequence[Option]
    check: Callable[[Settings], str]
    rounds: int = 5
    seconds: float = 2.0
    draw: Draw = ratio_plot.draw


def build_parser(suite: Suite) -> argparse.ArgumentParser:
    """The suite's own options and those that all have."""
    parser = argparse.ArgumentParser(
        prog=f"make {suite.target} BENCH_ARGS=...",
        description=suite.description,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=suite.rounds, help="of each comparison (%(default)s)")
    add("--seconds", type=float, default=suite.seconds, help="of a measurement (%(default)s)")
    for option in suite.options:
        if option.parse is None:
            add(option.flag, dest=option.field, action="store_true", help=option.help)
        else:
            text = f"{option.help} ({option.default})" if option.default else option.help
            value = option.flag.removeprefix("--").replace("-", "_").upper()
            add(option.flag, dest=option.field, default=option.default, metavar=value, help=text)
    parser.add_argument(
        "comparisons",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(suite.comparisons)} (default: all)",
    )
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
        help="where times count: keep processors awake for both sides alike (awake), or let them "
        "idle as this host does, where only an Infiniswap device keeps them awake (host)",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        metavar="N",
        help="priority of everything that is measured; negative on a machine that others use",
    )
    output = ROOT / "build" / f"{suite.target}-results"
    parser.add_argument("--output", type=Path, default=output, help=f"directory ({output})")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build" / "bench", help="where to build the programs"
    )
    parser.add_argument(
        "--work", type=Path, default=WORK_DIR, help="disk directory for a run's files"
    )
    parser.add_argument("--no-install", action="store_true", help="do not install missing peers")
    return parser


def parse(suite: Suite, argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """What was asked for, checked.

    Raises:
        UsageError: they cannot work.
    """
    args = build_parser(suite).parse_args(argv)
    given = {}
    for option in suite.options:
        value = getattr(args, option.field)
        try:
            given[option.field] = option.parse(value) if option.parse else value
        except ValueError:
            raise UsageError(f"{option.flag}: {value!r} is not a number") from None
    settings = Settings(args.rounds, args.seconds, quiet_share=args.quiet, **given)
    if settings.rounds < 1 or settings.seconds <= 0:
        raise UsageError("--rounds and --seconds must be positive")
    if problem := suite.check(settings):
        raise UsageError(problem)
    unknown = [name for name in args.comparisons if name not in suite.comparisons]
    if unknown:
        raise UsageError(f"there is no comparison {unknown[0]!r}: {', '.join(suite.comparisons)}")
    return args, settings


def run_one(bench: Bench, suite: Suite, key: str, awake: bool) -> Comparison:
    """One comparison. It is skipped, not failed, where this machine lacks what it needs."""
    module = suite.comparisons[key]
    bench.commands = {}
    start_s = time.monotonic()
    with processors_awake(awake and key in suite.timed) as note:
        try:
            found: Comparison = module.run(bench)
        except SkipError as error:
            return Comparison(key, module.TITLE, skipped=str(error))
    if key in suite.timed:
        found = replace(found, notes=[*found.notes, note])
    return replace(found, commands=bench.commands, elapsed_s=time.monotonic() - start_s)


@contextlib.contextmanager
def processors_awake(wanted: bool) -> Iterator[str]:
    """For both sides alike, so that wake-ups do not blur the comparison; yields a note about it."""
    request = CpuLatencyRequest()
    latency_us = idle_host().latency_us if wanted else None
    try:
        if not wanted:
            yield "Processors idled as on this host, unless an Infiniswap device kept them awake."
        elif latency_us is None:
            yield "This host's processors cannot be kept from sleeping."
        elif problem := request.hold(latency_us):
            yield f"Not kept awake: {problem}."
        else:
            yield f"Processors were kept awake for all sides (/dev/cpu_dma_latency: {latency_us})."
    finally:
        request.release()


def interrupt_behind(error: BaseException) -> Interrupted | None:
    """The signal whose end was under way when this error came up."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, Interrupted):
        cause = cause.__context__
    return cause


def report(
    comparisons: Sequence[Comparison], about: dict[str, Any], output: Path, draw: Draw
) -> None:
    """Prints the tables and writes results.json, results.md and results.png."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150, markup=False, emoji=False)
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
    if draw(comparisons, output / "results.png", caption):
        made.append("results.png")
    print(f"bench: wrote {', '.join(made)} in {output}")


def run(suite: Suite, args: argparse.Namespace, settings: Settings) -> int:
    """Runs what was asked for; returns the exit code."""
    if not args.no_install:
        missing = machine.install_peers(suite.packages)
        if missing:
            print(f"bench: missing, so some comparisons are left out: {', '.join(missing)}")
    print("bench: building the programs", flush=True)
    build_programs(ROOT, args.build)
    about: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["make", suite.target, f"BENCH_ARGS={shlex.join(sys.argv[2:])}"]),
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
        for key in args.comparisons or suite.comparisons:
            try:
                found.append(one := run_one(bench, suite, key, args.idle == "awake"))
                failed = f"{key}: {one.failed}" if one.failed else failed
            except (InfiniswapError, OSError) as error:  # the others' figures are kept
                if isinstance(error, InfiniswapError) and (signal := interrupt_behind(error)):
                    print(f"bench: {error}", file=sys.stderr)
                    raise signal from error
                failed = f"{key}: {error}"
                found.append(
                    Comparison(key, suite.comparisons[key].TITLE, skipped=f"failed: {error}")
                )
    about["load_after"] = machine.load()
    about["busy_after"] = machine.busy_share(_WATCH_S)
    report(found, about, args.output, suite.draw)
    if failed:
        print(f"bench: {failed}", file=sys.stderr)
        return 1
    return 0


def main(suite: Suite, argv: Sequence[str]) -> int:
    """The suite's command line; returns the exit code."""
    return exit_code(lambda: run(suite, *parse(suite, argv)))
