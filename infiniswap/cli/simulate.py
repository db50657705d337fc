# SPDX-License-Identifier: Apache-2.0
"""`infiniswap simulate`: a cluster in virtual time, ruled by the daemons' own policies."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infiniswap.cli.common.output import plain_console, results_console
from infiniswap.cli.common.parser import add_shared
from infiniswap.errors import InfiniswapError, UsageError

if TYPE_CHECKING:
    from infiniswap.simulation.runner import Simulated
    from infiniswap.system.programs import Process

_SEEDS_MAX = 10_000
_PROCESSES_MAX = 1024


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="show what lending would do to a cluster, in virtual time",
        description="Runs a cluster of any size in virtual time. Hosts, jobs, their memory and "
        "failures come from a scenario file; the code of the daemons decides where slabs go and "
        "when they are taken back. Touches no host. One scenario and one seed always give the same "
        "result.",
    )
    parser.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help="scenario file (TOML), or the name of one that comes with the program",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the scenarios that come with the program"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of everything random (default 0)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="run N seeds, beginning with --seed, and print means with standard errors (default 1)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="seeds that run at once (default: one for each processor)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the first seed's result to this PNG file"
    )
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Simulates it and prints the tables."""
    _check(args)
    if args.list:
        return _list()
    from infiniswap.simulation.reading import find, read

    path = find(args.scenario).absolute()
    scenario = read(path)  # a mistake shows before any process starts
    if args.seeds == 1:
        from infiniswap.simulation.runner import simulate

        with _progress(scenario.title) as progress:
            outcomes = [simulate(scenario, args.seed, progress)]
    else:
        with _progress(f"{scenario.title}, {args.seeds} seeds") as progress:
            outcomes = _in_processes(path, args, progress)
    if args.plot is not None:
        from infiniswap.simulation.plot import draw

        draw(outcomes[0], args.plot)
    if args.json:
        _print_json(outcomes)
    else:
        _print_tables(outcomes)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.scenario is None and not args.list:
        raise UsageError(
            "SCENARIO is missing",
            where="simulate",
            mend="Name a file, or one of those that `infiniswap simulate --list` shows.",
        )
    if args.seed < 0:
        raise UsageError("a seed is 0 or more", where="--seed")
    for option, number, most in (
        ("--seeds", args.seeds, _SEEDS_MAX),
        ("--processes", args.processes, _PROCESSES_MAX),
    ):
        if number is not None and not 1 <= number <= most:
            raise UsageError(f"{number} is not from 1 to {most}", where=option)
    # Checked now, not after minutes of work.
    if args.plot is not None and (args.plot.is_dir() or not os.access(args.plot.parent, os.W_OK)):
        raise UsageError(
            "the plot cannot be written there",
            where=f"--plot {args.plot}",
            mend="Name a file in a directory that you may write to.",
        )


def _list() -> int:
    from infiniswap.simulation.reading import read, shipped

    known = shipped()
    width = max(map(len, known))
    for name, path in known.items():
        print(f"{name:{width}}  {read(path).title}")
    return 0


@contextmanager
def _progress(title: str) -> Iterator[Callable[[float], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield lambda part: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda part: bar.update(task, completed=part)


# ------------------------------------------------------------------------ several seeds


def _in_processes(
    path: Path, args: argparse.Namespace, progress: Callable[[float], None]
) -> list[Simulated]:
    """One process for each seed, so many at once."""
    from infiniswap.system import programs

    at_once = args.processes or os.cpu_count() or 1
    seeds = list(range(args.seed, args.seed + args.seeds))
    running: dict[int, Process] = {}
    found: dict[int, Simulated] = {}
    try:
        while len(found) < len(seeds):
            for seed in seeds[len(found) + len(running) :]:
                if len(running) >= at_once:
                    break
                argv = programs.infiniswap("simulate", str(path), "--seed", str(seed), "--json")
                running[seed] = programs.start(argv, stdout=programs.PIPE, stderr=programs.PIPE)
            # The oldest one is read first: the others wait with at most a full pipe.
            seed = next(iter(running))
            found[seed] = _read(running.pop(seed), seed)
            progress(len(found) / len(seeds))
    finally:
        for child in running.values():
            child.kill()
            child.communicate()
    return [found[seed] for seed in seeds]


def _read(child: Process, seed: int) -> Simulated:
    import msgspec

    from infiniswap.simulation.runner import Simulated

    try:
        output, complaints = child.communicate()
    except BaseException:
        child.kill()
        child.communicate()
        raise
    if child.returncode:
        text = complaints.decode(errors="replace").strip().removeprefix("infiniswap: ")
        raise InfiniswapError(text or f"exit code {child.returncode}", where=f"seed {seed}")
    return msgspec.json.decode(output, type=list[Simulated])[0]


# ------------------------------------------------------------------------------ results


def _print_json(outcomes: Sequence[Simulated]) -> None:
    import json

    import msgspec

    json.dump(msgspec.to_builtins(list(outcomes)), sys.stdout, indent=2)
    print()


def _print_tables(outcomes: Sequence[Simulated]) -> None:
    from infiniswap.simulation.report import tables

    console = results_console()
    for table in tables(outcomes):
        console.print(table)
