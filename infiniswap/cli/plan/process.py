# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan --pid`: how much memory a running process uses."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.table import Table

from infiniswap.cli.common.output import results_console
from infiniswap.cli.plan.output import print_json
from infiniswap.planning import process
from infiniswap.units import format_size_short as short


def run(args: argparse.Namespace) -> int:
    """Reports; returns the exit code."""
    process.require(args.pid)
    cgroup = process.cgroup_of(args.pid) if args.probe else None
    used = list(process.working_set(args.pid))
    steps = [] if cgroup is None else list(process.probe(args.pid, cgroup))
    if args.json:
        print_json(
            {"pid": args.pid, "used": list(map(asdict, used)), "steps": [*map(asdict, steps)]}
        )
        return 0
    table = Table(title=f"process {args.pid}: memory used", title_justify="left")
    for name in ("within", "used", "resident", "swapped out"):
        table.add_column(name, justify="right")
    for each in used:
        row = (each.referenced_bytes, each.resident_bytes, each.swapped_bytes)
        table.add_row(f"{each.seconds:g} s", *map(short, row))
    console = results_console()
    console.print(table)
    if cgroup is None:
        console.print("no time is predicted: --probe lowers the limit of the process for that")
        return 0
    table = Table(title="pace at lower limits", title_justify="left")
    for name in ("limit", "slowdown", "page-ins per second of this host"):
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(short(step.limit_bytes), f"{step.slowdown:.2f}", f"{step.page_ins_per_s:.0f}")
    console.print(table)
    best = process.smallest(steps, args.slowdown)
    console.print(
        f"a slowdown of at most {args.slowdown:g} needs a limit "
        + ("above all that were tried" if best is None else f"of {short(best.limit_bytes)}")
    )
    return 0
