# SPDX-License-Identifier: Apache-2.0
"""How `infiniswap plan` shows what it found."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from infiniswap.cli.common.output import results_console
from infiniswap.control.text import printable
from infiniswap.planning import report
from infiniswap.planning.report import Planned


def show(args: argparse.Namespace, plan: Planned) -> None:
    """A plan: as JSON or as a table with what is to be said, and as a picture."""
    if args.json:
        print_json(asdict(plan))
    else:
        _print_text(plan)
    if args.plot is not None and plan.curve:
        report.draw(plan, args.plot)


def _print_text(plan: Planned) -> None:
    console = results_console()
    if plan.curve:
        console.print(report.table(plan), highlight=False, markup=False)
    for line in report.lines(plan):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def print_json(found: dict[str, Any]) -> None:
    """To standard output."""
    json.dump(found, sys.stdout, indent=2)
    print()
