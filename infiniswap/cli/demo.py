# SPDX-License-Identifier: Apache-2.0
"""`infiniswap demo`: two donors, a device and a real job on this one machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "demo",
        help="show two donors, a device and a real job on this one machine",
        description="Runs a pandas job on TPC-H data with all the memory it wants, then with half "
        "of that: with Infiniswap (two donors on this machine), with Infiniswap and far memory "
        "(--paging far, left out where the kernel cannot do it), and with swap on a disk as slow "
        "as a cloud volume. Prints a table of the runs; fails unless the outputs are identical and "
        "donors served the pages. Needs root and the `demo` extra, takes a few minutes and leaves "
        "nothing behind.",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("/var/tmp"),
        metavar="DIR",
        help="directory on a local disk for data and disk volume (default /var/tmp)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the TPC-H data in ~/.cache for the next demo"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results to this file as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Runs it and judges the results."""
    import json

    from infiniswap.cli.common.output import results_console
    from infiniswap.demo import results, runner
    from infiniswap.errors import CheckFailedError, UsageError, from_oserror

    # Checked now, not after minutes of work.
    if args.json is not None and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK)):
        raise UsageError(
            "the results cannot be written there",
            where=f"--json {args.json}",
            mend="Name a file in a directory that you may write to.",
        )
    found = runner.run(runner.Options(parent=args.dir, keep=args.keep))
    failed = results.failures(found)
    if args.json is not None:
        try:
            text = json.dumps(results.as_json(found, failed), indent=2)
            args.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise from_oserror("cannot write the results", error, where=str(args.json)) from error
    results_console().print(results.table(found))
    for remark in results.remarks(found):
        print(remark)
    if failed:
        raise CheckFailedError(
            "; ".join(failed),
            where="demo",
            mend="Run it again on an otherwise idle machine, and report it if it stays.",
        )
    print(
        f"All {len(found.legs)} outputs are identical. The demo took {found.total_s:.0f} s and "
        "left nothing behind."
    )
    return 0
