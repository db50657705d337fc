# SPDX-License-Identifier: Apache-2.0
"""The command `tools/vm`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from infiniswap.cli.main import report
from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.units import format_size, parse_size
from qemu_vm import accel, cache, initrd, kernels, machine, plan, rxe

PROGRAM = "tools/vm"
VERBS = ("shell", "build", "clean", rxe.DEMO)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EPILOG = """
The guest has this host's files as its root; what it writes stays in it, but for /run/vm/share.
/var/tmp is a disk of its own. More: docs/vm.md.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog, mend=f"See `{PROGRAM} --help`.")


def build_parser() -> argparse.ArgumentParser:
    """Options of all verbs."""
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [OPTION...] -- COMMAND... | {PROGRAM} [OPTION...] {{{','.join(VERBS)}}}",
        description="Runs a command in a virtual machine with a Debian kernel: streams its output "
        "and returns its exit status. shell: a shell there. build: only fetches and makes what "
        "is cached. clean: removes the cache. demo (with --hosts 3 --rxe): a job that swaps over "
        "RDMA to the memory of two other machines.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = list(kernels.SUITES)
    add("--kernel", choices=names, default=names[0], help=f"which ({names[0]})")
    add("--hosts", type=int, default=1, metavar="N", help="machines h1, h2, ... on one network (1)")
    add(
        "--rxe",
        action="store_true",
        help="first make them a cluster over soft-RoCE: the last machine has a swap device, all "
        "others are its donors",
    )
    add("--memory", default="1G", metavar="SIZE", help="of each machine (1G)")
    add(
        "--cpus",
        type=int,
        metavar="N",
        help="of each machine (2; with several machines 1; 6.1 has 1 without KVM)",
    )
    add("--disk", default="8G", metavar="SIZE", help="size of /var/tmp, a sparse file (8G)")
    add("--share", type=Path, metavar="DIR", help="a directory of this host for /run/vm/share")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="for the command")
    add("--timeout", type=float, default=1800.0, metavar="S", help="for the command (1800)")
    add("--boot-timeout", type=float, default=600.0, metavar="S", help="until it starts (600)")
    add("--accel", choices=accel.CHOICES, default="", help="KVM where it is usable (auto)")
    add("words", nargs="*", metavar="-- COMMAND...", help=argparse.SUPPRESS)
    return parser


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is ours, and the command after the first `--`."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        mine, command = split(sys.argv[1:] if argv is None else argv)
        args = build_parser().parse_args(mine)
        verb = args.words[0] if args.words else ""
        if len(args.words) > 1 or (verb and (verb not in VERBS or command)):
            raise UsageError(
                f"what is {' '.join(args.words)!r}?", mend=f"A command stands after --: {_EXAMPLE}."
            )
        if verb == "clean":
            machine.sweep()
            print(f"removed {format_size(cache.clean())} from {cache.directory()}")
            return 0
        if verb == "build":
            return _build(args)
        if not verb and not command:
            raise UsageError("there is no command to run", mend=f"For example: {_EXAMPLE}.")
        if verb == rxe.DEMO and not args.rxe:
            raise UsageError(f"the demo is one of soft-RoCE: {PROGRAM} --hosts 3 --rxe demo")
        with _ending_in_order():
            return machine.run(_plan(args, command, verb))
    except InfiniswapError as error:
        _report(error)
        return error.exit_code
    except _Interrupted as error:
        return 128 + error.number


_EXAMPLE = f"{PROGRAM} -- uname -r"


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    before = {number: signal.signal(number, _interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)  # what follows is short, and half of it helps nobody
    raise _Interrupted(number)


def _plan(args: argparse.Namespace, command: Sequence[str], verb: str) -> plan.Plan:
    terminal = verb == "shell"
    env = plan.environment(args.env, os.environ)
    if args.rxe:
        rxe.check(args.hosts)
        command = rxe.command(command)
        env |= rxe.environment(demo=verb == rxe.DEMO)
    made = plan.Plan(
        tuple(command) or (os.environ.get("SHELL", "/bin/bash"), "-l"),
        args.kernel,
        args.hosts,
        parse_size(args.memory),
        args.cpus or (2 if args.hosts == 1 else 1),
        parse_size(args.disk),
        args.share.resolve() if args.share else None,
        accel.wanted(args.accel),
        None if terminal else args.timeout,
        args.boot_timeout,
        env,
        Path.cwd(),
        terminal,
    )
    plan.check(made)
    return made


def _build(args: argparse.Namespace) -> int:
    kernel = kernels.get(args.kernel)
    chosen = accel.choose(accel.wanted(args.accel), kernel, initrd.get(kernel))
    print(f"kernel {kernel.release} ({chosen}): {kernel.root}")
    return 0


def _report(error: InfiniswapError) -> None:
    """One paragraph; kernel messages in it keep their lines."""
    head, newline, rest = str(error).partition("\n")
    if not newline:
        report(error)
        return
    print(f"infiniswap: {head}\n{rest}", file=sys.stderr)
