# SPDX-License-Identifier: Apache-2.0
"""`make bench-before`: another suite's comparisons in this tree and in an earlier one, by turns.

Each tree runs its own benchmark with one round; what is compared is our side of each figure that
both have. The order changes with every pair, so that a machine which gets slower meanwhile favours
neither."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infiniswap.errors import SystemCallError, UsageError
from infiniswap.system.interrupts import Interrupted, Interrupts
from isw_bench.children import KEPT
from isw_bench.exits import exit_code
from isw_bench.results import format_spread, format_value
from isw_bench.stats import Spread, pair_ratios, spread
from isw_bench.suite import ROOT

BOUND = 1.03
"""Of the lower quartile of now / before: a figure above it is worse than it was."""
_SUITES = ("peers", "faults", "frontends", "rdma")
_PAIRS = 9
_HEADINGS = ("comparison", "figure", "before", "now", "now / before [IQR]", "verdict")


@dataclass(frozen=True, slots=True)
class Key:
    """What both trees measure."""

    comparison: str
    figure: str
    side: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """One figure of both trees.

    Attributes:
        unit: of the values.
        better: "lower" or "higher".
        before, now: one value per pair.
    """

    unit: str
    better: str
    before: Sequence[float]
    now: Sequence[float]

    @property
    def ratio(self) -> Spread:
        """Of the pairs' now / before; the inverse where more is better: below 1 is a gain."""
        if self.better == "higher":
            return spread(pair_ratios(self.before, self.now))
        return spread(pair_ratios(self.now, self.before))

    @property
    def verdict(self) -> str:
        """ "pass" or "worse"."""
        return "pass" if self.ratio.q1 <= BOUND else "worse"


def figures_of(results: Mapping[str, Any]) -> dict[Key, tuple[str, str, float]]:
    """Unit, direction and our value of each figure in a suite's results.json."""
    found = {}
    for comparison, one in results["comparisons"].items():
        for figure in one["figures"]:
            value = figure["ours"]["median"]
            if value is not None and math.isfinite(value):
                key = Key(comparison, figure["name"], figure["ours"]["name"])
                found[key] = (figure["unit"], figure["better"], value)
    return found


def paired(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> dict[Key, Pairs]:
    """The figures that every run of both trees has.

    Args:
        before, now: results.json of each run, in the order of the pairs.
    """
    runs_before, runs_now = [[figures_of(one) for one in side] for side in (before, now)]
    every = [*runs_before, *runs_now]
    keys = [key for key in every[0] if all(key in one for one in every)]
    return {
        key: Pairs(
            *every[0][key][:2],
            before=[one[key][2] for one in runs_before],
            now=[one[key][2] for one in runs_now],
        )
        for key in keys
    }


def check_out(commit: str, into: Path) -> Path:
    """The earlier tree with its own build below `into`, set up; kept for the next time.

    Raises:
        UsageError: there is no such commit.
        SystemCallError: it cannot be set up.
    """
    try:
        told = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        raise UsageError(f"this checkout knows no commit {commit!r}") from None
    tree = into / told.stdout.strip()[:12]
    if not (tree / "Makefile").exists():
        shutil.rmtree(tree, ignore_errors=True)
        _call(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree)])
        _call(["git", "-C", str(tree), "checkout", "--quiet", "--detach", told.stdout.strip()])
    _call(["make", "--no-print-directory", "-C", str(tree), "setup"])
    return tree


def _call(argv: Sequence[str]) -> None:
    """Raises:
    SystemCallError: it failed.
    """
    with _child(argv) as child:
        code = child.wait()
    if code:
        raise SystemCallError(f"`{' '.join(argv)}` failed with exit code {code}")


@contextlib.contextmanager
def _child(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that cleans up behind itself: a signal that ends us ends it, too, and is waited
    for, however long that takes."""
    child = subprocess.Popen(argv, start_new_session=True)  # a Ctrl-C reaches it once, through us
    try:
        yield child
    except Interrupted:
        child.send_signal(signal.SIGINT)
        raise
    finally:
        child.wait()


def build(tree: Path) -> None:
    """Builds the programs of a tree's benchmarks where they would do it themselves.

    Raises:
        SystemCallError: it failed.
    """
    code = "from isw_bench import bench, suite; "
    code += "bench.build_programs(suite.ROOT, suite.ROOT / 'build' / 'bench')"
    _call(_python(tree, "-c", code))


def _python(tree: Path, *argv: str, changes: Sequence[str] = ()) -> list[str]:
    path = f"PYTHONPATH={tree / 'tools/bench'}"
    kept = " ".join(change.partition("=")[0] for change in changes)
    return ["env", path, f"{KEPT}={kept}", *changes, str(tree / ".venv/bin/python"), *argv]


def measure(
    tree: Path, suite: str, options: Sequence[str], output: Path, changes: Sequence[str] = ()
) -> Any:
    """One round of a tree's own benchmark: its results.json.

    Args:
        changes: of the environment, NAME=VALUE.

    Raises:
        SystemCallError: it wrote none.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").unlink(missing_ok=True)  # of an earlier run
    argv = ["-m", "isw_bench", suite, *options, "--rounds", "1", "--output", str(output)]
    with _child(_python(tree, *argv, changes=changes)) as child:
        child.wait()
    try:
        return json.loads((output / "results.json").read_text())
    except (OSError, ValueError) as error:
        raise SystemCallError(f"the benchmark of {tree} wrote no results: {error}") from error


def report(found: Mapping[Key, Pairs], about: Mapping[str, Any], output: Path) -> None:
    """Prints the table and writes results.json."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*_HEADINGS)
    rows = []
    for key, pairs in found.items():
        before, now = spread(pairs.before).median, spread(pairs.now).median
        name = f"{key.side}: {key.figure}, {pairs.unit}"
        values = (format_value(before), format_value(now), format_spread(pairs.ratio))
        table.add_row(key.comparison, name, *values, pairs.verdict)
        rows.append(asdict(key) | asdict(pairs) | {"ratio": asdict(pairs.ratio)})
    Console(width=None if sys.stdout.isatty() else 150, markup=False, emoji=False).print(table)
    (output / "results.json").write_text(json.dumps({**about, "figures": rows}, indent=2) + "\n")
    print(f"bench: wrote results.json in {output}")


def build_parser() -> argparse.ArgumentParser:
    """The options; those of the suite follow."""
    parser = argparse.ArgumentParser(
        prog="make bench-before BEFORE=COMMIT SUITE=NAME BENCH_ARGS=...",
        description="A suite's comparisons in an earlier tree and in this one, by turns. Options "
        "that are not listed here go to the suite; both trees must know them.",
        allow_abbrev=False,
    )
    parser.add_argument("commit", help="of the earlier tree")
    parser.add_argument("suite", choices=_SUITES, help="what to run")
    parser.add_argument("--pairs", type=int, default=_PAIRS, help="of runs (%(default)s)")
    parser.add_argument("--set-up", action="store_true", help="check out and build, no more")
    parser.add_argument(
        "--now",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment of this tree alone, to leave out what the earlier one lacks, such "
        "as INFINISWAP_DEVICE_SEAL=false; may be given again",
    )
    output = ROOT / "build" / "bench-before-results"
    parser.add_argument("--output", type=Path, default=output, help=f"directory ({output})")
    return parser


def run(argv: Sequence[str]) -> int:
    """Runs what was asked for; 1 if a figure is worse."""
    args, options = build_parser().parse_known_args(argv)
    if args.pairs < 1:
        raise UsageError("--pairs must be positive")
    for change in args.now:
        if "=" not in change:
            raise UsageError(f"--now {change!r} is not NAME=VALUE")
    trees = {"before": check_out(args.commit, ROOT / "build" / "before"), "now": ROOT}
    if args.set_up:
        for tree in trees.values():
            build(tree)
        return 0
    changes = {"before": [], "now": args.now}
    runs: dict[str, list[Any]] = {"before": [], "now": []}
    order = list(trees)
    for number in range(1, args.pairs + 1):
        print(f"bench: pair {number} of {args.pairs}", flush=True)
        pair = {
            side: measure(
                trees[side],
                args.suite,
                options,
                args.output / f"{number}-{side}",
                changes[side],
            )
            for side in order
        }
        for side, result in pair.items():
            runs[side].append(result)
        order.reverse()
        found = paired(runs["before"], runs["now"])
        about = {"suite": args.suite, "options": options, "now": args.now, "load": os.getloadavg()}
        for side in trees:
            about[side] = runs[side][0]["versions"]["commit"]
        report(found, about, args.output)
    if not found:
        raise SystemCallError("the two trees have no figure in common (see what was left out)")
    return int(any(pairs.verdict == "worse" for pairs in found.values()))


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit code."""

    def interruptible() -> int:
        with Interrupts():
            return run(argv)

    return exit_code(interruptible)
