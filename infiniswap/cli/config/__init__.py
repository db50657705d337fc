# SPDX-License-Identifier: Apache-2.0
"""`infiniswap config check`: everything that is wrong with the configuration, at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infiniswap import config as configuration
from infiniswap.errors import ConfigError, InfiniswapError, UsageError


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "config",
        help="check the configuration",
        description="Checks the configuration file.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="print every mistake in the configuration; exit code 3 if there is one",
        description="Reads the configuration as daemon and devices do, and prints every mistake: "
        "unknown keys, wrong values, values that contradict each other, paths and permissions that "
        "would make a start fail, and the same for devices declared beside the file "
        "(devices/NAME.env). Changes nothing. Exit code 3 if there is a mistake.",
    )
    check.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help=f"file to check (default: INFINISWAP_CONFIG, or {configuration.DEFAULT_PATH})",
    )
    check.add_argument(
        "--config", type=Path, metavar="FILE", help="file to check, the same as FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Prints every mistake."""
    from infiniswap.cli.main import report

    file = args.file or args.config
    if args.file and args.config:
        raise UsageError(
            f"two files were named: {args.file} and {args.config}", mend="Name one of them."
        )
    path = configuration.file_path(file)
    errors, notes = examine(file)
    for error in errors:
        report(error)
    for note in notes:
        print(f"infiniswap: note: {note}", file=sys.stderr)
    there = f"{path}" if errors or os.path.exists(path) else f"no {path}: defaults"
    if errors:
        mistakes = "one mistake" if len(errors) == 1 else f"{len(errors)} mistakes"
        print(f"{there}: {mistakes}")
        return ConfigError.exit_code
    print(f"{there}: nothing is wrong")
    return 0


def examine(file: Path | None) -> tuple[list[InfiniswapError], list[str]]:
    """Every mistake, and notes.

    Args:
        file: as the command line names it.
    """
    config, found = configuration.check(file)
    errors: list[InfiniswapError] = [*found]
    notes: list[str] = []
    if config is not None and not found:
        for problem in _start_problems(config, configuration.file_path(file)):
            if isinstance(problem, InfiniswapError):
                errors.append(problem)
            else:
                notes.append(problem)
    return errors, notes


def _start_problems(config: configuration.Config, path: Path) -> Iterator[InfiniswapError | str]:
    # Imported late: most mistakes are found without these modules.
    from infiniswap.cli.common import declared_devices
    from infiniswap.cli.config import paths

    if os.geteuid() != 0:
        yield (
            "paths and permissions were not checked, because that needs root: sudo infiniswap "
            "config check"
        )
        return
    devices = declared_devices.find(path.parent / "devices")
    yield from paths.problems(config, has_devices=bool(devices))
    for device in devices:
        yield from declared_devices.problems(device, path)
    yield from declared_devices.boot_notes(devices)
