# SPDX-License-Identifier: Apache-2.0
"""`infiniswap top`: donors, this host's devices, who uses what, and what happens, as it happens.

It asks for what `status --json` shows, again and again; nothing here changes anything. `picture`
and `changes` are pure, `view` draws, `loop` asks and reads keys. Only `cli.main` enters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from infiniswap.cli.common.donors import load_with_donors
from infiniswap.cli.common.parser import add_shared
from infiniswap.errors import UnavailableError


def add_parser(subparsers: Any) -> None:
    """Adds the parser of `top`."""
    parser = subparsers.add_parser(
        "top",
        help="watch donors, devices and jobs in the terminal",
        description="Shows the donors that are configured or announced, this host's devices, who "
        "uses how much memory, and what changes. Rates are those of the last seconds. Keys: 1 to 4 "
        "show one section in full, 0 shows all, arrows scroll, p pauses, q ends.",
    )
    add_shared(parser, "--config", "--secret-file")
    parser.add_argument(
        "--donors",
        metavar="H[:P],...",
        help="watch only these donors, by address or name (default: those configured or announced)",
    )


def run(args: argparse.Namespace) -> int:
    """Watches until a key ends it.

    Raises:
        UnavailableError: there is no terminal to draw on.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UnavailableError(
            "top needs a terminal to draw on and to read keys from",
            mend="In a script or a pipe use `infiniswap status`, with --json for programs.",
        )
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise UnavailableError(
            "this terminal cannot move its cursor",
            where="TERM",
            mend="Set TERM to what it is, such as xterm-256color, or use `infiniswap status`.",
        )
    config = load_with_donors(args.config, args.donors, {"cluster.secret_file": args.secret_file})
    from infiniswap.cli.top.loop import watch

    asyncio.run(watch(config))
    return 0
