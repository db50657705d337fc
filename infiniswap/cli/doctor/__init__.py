# SPDX-License-Identifier: Apache-2.0
"""`infiniswap doctor`: what this host can do, what is missing, and the command that mends it.

Each module of this room checks one subject and yields findings (`finding`); `examine` runs them in
order. `infiniswap init` uses some of the checks; no other module enters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.cli.common.output import results_console
from infiniswap.cli.common.parser import add_shared
from infiniswap.cli.doctor.finding import MISSING, OK, WARN, Check, Finding, good, guarded, missing
from infiniswap.documents import page
from infiniswap.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what this host can do, and what is missing",
        description="Checks this host and prints what works, what is missing, and the command that "
        "mends it. Changes nothing. Exit code 0: this host can run jobs; 5: it cannot.",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print a report about hardware, kernel and running devices as JSON, to send to "
        "others: it has no names, addresses or secrets",
    )
    parser.add_argument(
        "--speed",
        action="store_true",
        help="also measure the bandwidth to each donor, for two seconds each, and say what it "
        "means for page-ins; that fills the network meanwhile",
    )
    add_shared(parser, "--json", "--config", "--donors", "--secret-file")


def run(args: argparse.Namespace) -> int:
    """Prints the findings."""
    from infiniswap.cli.common.donors import donors_of
    from infiniswap.discovery.static import only_these

    overrides: dict[str, object] = {"cluster.secret_file": args.secret_file}
    donors: object = args.donors
    with contextlib.suppress(ConfigError):  # which is a finding
        donors = donors_of(args.donors, args.config, overrides)
    overrides |= only_these(donors)
    config, finding = _configuration(args.config, overrides)
    findings = [finding, *examine(config, speed=args.speed)]
    if args.report:
        from infiniswap.cli.doctor.report import report

        json.dump(report(config, findings), sys.stdout, indent=2)
        print()
    elif args.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        print()
    else:
        _print(findings)
    return 5 if any(f.state == MISSING and f.name in _NEEDED for f in findings) else 0


_NEEDED: Final = frozenset(
    {
        "configuration",
        "root",
        "library",
        "seal",
        "fuse",
        "loop",
        "memory-cgroup",
        "swappiness",
        "backup",
    }
)
"""Findings that `infiniswap run` needs."""


def _configuration(
    path: Path | None, overrides: dict[str, object]
) -> tuple[configuration.Config, Finding]:
    """The configuration and its finding. Where it is wrong: the defaults, so that the host is
    still checked."""
    try:
        config = configuration.load(path, overrides)
    except ConfigError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        mend = error.mend or f"correct it; {page('configuration.md')} lists every key"
        finding = missing("configuration", f"{what}; the other findings are for the defaults", mend)
        try:
            return configuration.load(Path("/dev/null"), overrides, {}), finding
        except ConfigError:
            return configuration.Config(), finding
    file = path or Path(os.environ.get("INFINISWAP_CONFIG") or configuration.DEFAULT_PATH)
    return config, good(
        "configuration", f"{file}" if os.path.exists(file) else f"defaults (no {file})"
    )


def examine(config: configuration.Config, *, speed: bool = False) -> Iterator[Finding]:
    """Every finding, in the order of the report. A check that fails is a finding itself.

    Args:
        config: what is checked.
        speed: whether to measure the bandwidth to donors too.
    """
    # Imported late: other commands do not need these modules.
    from infiniswap.cli.doctor import devices, donors, host, rdma, swap

    checks: tuple[tuple[str, Check], ...] = (
        ("host", host.host),
        ("root", host.root),
        ("library", host.library),
        ("seal", lambda: host.seal(config)),
        ("host-key", lambda: host.host_key(config)),
        ("front-ends", host.front_ends),
        ("far-memory", host.far),
        ("memory-cgroup", host.memory_cgroup),
        ("swap-safety", host.rights),
        ("starter", host.starter),
        ("open-files", lambda: host.open_files(config)),
        ("idle", lambda: host.idle(config)),
        ("overcommit", host.overcommit),
        ("memory-killers", lambda: host.killers(config)),
        ("swap-settings", swap.settings),
        ("swap", lambda: swap.areas(config)),
        ("rdma", lambda: rdma.rdma(config)),
        ("backup", lambda: devices.backup(config)),
        ("secret", lambda: donors.secret(config)),
        ("listen", lambda: donors.listening(config)),
        ("donors", lambda: donors.donors(config, speed=speed)),
        ("device-unit", devices.unit),
        ("records", lambda: devices.records(config)),
        ("devices", lambda: devices.devices(config)),
        ("leftovers", lambda: devices.left_behind(config)),
    )
    for name, check in checks:
        yield from guarded(name, check)


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {OK: "green", WARN: "yellow", MISSING: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.what)
        if finding.mend:
            text.append(f"\n  mend: {finding.mend}", style="italic")
        table.add_row(finding.name, Text(finding.state, style=styles[finding.state]), text)
    console = results_console()
    console.print(table)
    closing = "Which jobs gain, and which gain more from something else: "
    console.print(closing + page("when-to-use.md"), soft_wrap=True, markup=False, highlight=False)
