# SPDX-License-Identifier: Apache-2.0
"""`infiniswap`: parses the command line, runs one command, maps errors to exit codes.

A command is a module of this package with two functions: `add_parser(subparsers)` registers its
arguments, and `run(args)` does it and returns the exit code. Importing one must be cheap: what
only `run` needs (aiohttp, rich, the C library) it imports inside.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import pkgutil
import resource
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol, cast

import infiniswap.cli
from infiniswap.cli.common.output import OutputError, is_reader_gone, open_standard_streams
from infiniswap.cli.common.parser import Parser
from infiniswap.errors import InfiniswapError, MemoryLimitError, NotFoundError, SystemCallError
from infiniswap.own_code import FAR_VARIABLE, check_own_code, trusted_users

_FIRST = (
    *("daemon", "device", "run", "status", "top", "ui", "donor"),
    *("doctor", "init", "invite", "join", "config", "service"),
)
_NO_COMMANDS = ("main", "common")


def _commands() -> tuple[str, ...]:
    """Modules of this package, in the order of the help text: those that are needed first, then the
    others by name."""
    found = {module.name for module in pkgutil.iter_modules(infiniswap.cli.__path__)}
    found.difference_update(_NO_COMMANDS)
    return (*_FIRST, *sorted(found.difference(_FIRST)))


COMMANDS = _commands()

_MEMORY_BYTES_MIN = 64 << 20
"""With this `status` and `device list` work."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Command(Protocol):
    """What each command module provides."""

    def add_parser(self, subparsers: Any) -> None:
        """Adds the command's own parser to `subparsers`."""

    def run(self, args: argparse.Namespace) -> int:
        """Does it; returns the exit code. Raises InfiniswapError."""


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"infiniswap.cli.{name}"))


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole parser, or one that knows only the command `only` (start-up is quicker)."""
    parser = Parser(
        prog="infiniswap",
        description="Lends a cluster's idle memory to the hosts that have run out of theirs.",
        epilog="Exit codes are listed in the manual, infiniswap(1).",
    )
    parser.add_argument(
        "--version", action="version", version=f"infiniswap {infiniswap.__version__}"
    )
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name in COMMANDS if only is None else (only,):
        _load(name).add_parser(subparsers)
    return parser


def report(error: InfiniswapError) -> None:
    """Prints one paragraph to standard error."""
    width = 100
    try:
        width = max(40, min(width, os.get_terminal_size(sys.stderr.fileno()).columns))
    except (OSError, ValueError):
        width = 1_000_000  # not a terminal: one line, easy to search for
    text = " ".join(str(error).split())
    print(
        textwrap.fill(f"infiniswap: {text}", width, break_long_words=False, break_on_hyphens=False),
        file=sys.stderr,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    os.environ.pop(FAR_VARIABLE, None)
    open_standard_streams()
    code = 0
    try:
        _check_memory()
        code = _execute(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except MemoryLimitError as error:
        report(error)
        return error.exit_code
    except OutputError as error:
        if not is_reader_gone(error):
            lost = SystemCallError(
                f"the output is incomplete: {error.strerror}",
                where="standard output",
                mend="Only the output is missing: what the command has changed stays changed.",
            )
            report(lost)
            return code or lost.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (MemoryError, RuntimeError, ImportError, SystemError, OSError) as error:
        is_other = isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EAGAIN)
        limits = "" if is_other else _limits_of_shell()
        if not limits:
            raise
        starved = MemoryLimitError(
            f"a limit of this shell leaves no room for the command ({limits}): "
            f"{str(error) or type(error).__name__}",
            mend="Raise it (ulimit, as root), or run the command from a shell without it.",
        )
        report(starved)
        return starved.exit_code
    return code


def _check_memory() -> None:
    """Raises MemoryLimitError where no command could even be loaded, and no error be reported."""
    for limit, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY and soft < _MEMORY_BYTES_MIN:
            raise MemoryLimitError(
                f"this shell allows {soft >> 20} MiB, and the command needs "
                f"{_MEMORY_BYTES_MIN >> 20} MiB",
                where=f"ulimit {option}",
                mend="Raise it (as root), or run the command from a shell without it.",
            )


def _limits_of_shell() -> str:
    """Limits that refuse memory, threads and libraries, as `ulimit` shows them; empty: none."""
    found = []
    for limit, option, unit_bytes in (
        (resource.RLIMIT_AS, "-v", 1024),
        (resource.RLIMIT_DATA, "-d", 1024),
        (resource.RLIMIT_NPROC, "-u", 1),
    ):
        soft = resource.getrlimit(limit)[0]
        # Every login has a limit on processes, which does not hold for root.
        if soft != resource.RLIM_INFINITY and (unit_bytes > 1 or os.geteuid() != 0):
            found.append(f"ulimit {option} is {soft // unit_bytes}")
    return ", ".join(found)


def _execute(arguments: list[str]) -> int:
    only = arguments[0] if arguments and arguments[0] in COMMANDS else None
    try:
        args = build_parser(only).parse_args(arguments)
        if os.geteuid() == 0:
            check_own_code(trusted_users(os.environ))
        return _load(args.command).run(args)
    except InfiniswapError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as end:  # of --help and --version
        return int(end.code or 0)
    except FileNotFoundError:
        if _has_directory():
            raise
        gone = NotFoundError(
            "the current directory has been removed", mend="Change to another one."
        )
        report(gone)
        return gone.exit_code


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
