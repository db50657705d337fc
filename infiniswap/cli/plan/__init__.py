# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan`: how long a job takes at each memory limit, from a few runs of it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import stat
import sys
from pathlib import Path
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.cli.common.parser import add_shared
from infiniswap.cli.device.options import load_config
from infiniswap.cli.run import add_device_choice, check_device, with_device
from infiniswap.errors import NoDonorError, NotPermittedError, UnavailableError, UsageError
from infiniswap.units import counted

_DISK_ONLY_BYTES: Final = 2**30


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "plan",
        help="predict how long a command takes at each memory limit",
        description="Runs COMMAND without a limit, then with half of the memory that it used, "
        "until it has lost five times the time of the first run. "
        "Predicts its time at the limits between with the donors and the disk as they are, tries "
        "up to three limits, and names the smallest --local for a slowdown.",
    )
    parser.add_argument(
        "--slowdown",
        type=float,
        default=1.1,
        metavar="X",
        help="recommend the smallest limit at which the command takes about X times as long "
        "(default 1.1)",
    )
    parser.add_argument(
        "--forget",
        action="store_true",
        help="first forget what earlier plans have measured on this host",
    )
    parser.add_argument(
        "--pid",
        type=int,
        metavar="N",
        help="report how much memory process N uses; clears the kernel's referenced bits of its "
        "pages",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="with --pid: lower the limit of the process's cgroup step by step, measure its pace, "
        "and take the limit back",
    )
    add_device_choice(parser, "what donors can lend, less where the disk has less room")
    add_shared(parser, "--json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the curves to this PNG file"
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="[--] COMMAND...")
    parser.set_defaults(quiet=True, local="", summary_json=None, paging="swap")


def run(args: argparse.Namespace) -> int:
    """Plans; returns the exit code."""
    from infiniswap.planning import history

    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    _check(args, command)
    config = load_config(args)
    past = history.path_in(config.daemon.state_dir)
    if args.forget:
        count = history.forget(past)
        print(f"forgot {counted(count, 'measurement')} of earlier plans", file=sys.stderr)
        if not command and args.pid is None:
            return 0
    if args.pid is not None:
        from infiniswap.cli.plan import process

        return process.run(args)
    return _command(args, config, command, past)


def _check(args: argparse.Namespace, command: list[str]) -> None:
    """Raises UsageError for arguments that make no sense, UnavailableError for a plot that cannot
    be drawn."""
    if not 1.0 < args.slowdown < math.inf:
        raise UsageError(f"{args.slowdown:g} is not a number above 1", where="--slowdown")
    check_device(args)
    if args.probe and args.pid is None:
        raise UsageError(
            "--probe belongs to --pid", mend="A command is probed without it: leave --probe out."
        )
    if args.pid is not None and command:
        raise UsageError("--pid and a command cannot be used together", mend="Leave out one.")
    if args.pid is None and not command and not args.forget:
        raise UsageError(
            "there is no command to plan for",
            mend="For example: infiniswap plan --donors HOST -- python prep.py",
        )
    if args.plot is not None and (args.plot.is_dir() or not os.access(args.plot.parent, os.W_OK)):
        raise UsageError(
            "the plot cannot be written there",
            where=f"--plot {args.plot}",
            mend="Name a file in a directory that you may write to.",
        )
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        from infiniswap.planning.report import install

        raise UnavailableError("a plot needs matplotlib", where="--plot", mend=install())
    if command and not _can_read_twice():
        raise UsageError(
            "standard input is a pipe, which only the first run could read",
            mend="Give the input as a file: infiniswap plan -- COMMAND <FILE.",
        )


def _can_read_twice() -> bool:
    mode = os.fstat(0).st_mode
    return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


def _command(
    args: argparse.Namespace, config: configuration.Config, command: list[str], past: Path
) -> int:
    from infiniswap.cli.plan.output import show
    from infiniswap.cli.plan.runs import PlanRuns
    from infiniswap.cli.run.request import EndingSignal, RunRequest, ending_signals_raise
    from infiniswap.device.jobs import job, sudo
    from infiniswap.planning.watch import WholeWatch
    from infiniswap.system.cgroup_limits import memory_allowed_bytes
    from infiniswap.system.job_cgroup import memory_for_jobs

    is_member = os.geteuid() != 0
    if is_member and args.device is None:
        raise NotPermittedError(
            "`infiniswap plan` sets up swap space and a memory limit, which needs root",
            mend="Run it with sudo; the command itself then runs as you. Without root it needs a "
            "device that an administrator has started: --device NAME.",
        )
    user = None if is_member else sudo.invoking_user(os.environ)
    job.check_command(command, user)
    has_donors = _choose_size(args, config)
    limit_bytes = memory_for_jobs().total_bytes
    if is_member:  # the device holds a job to what its member may use
        limit_bytes = min(limit_bytes, memory_allowed_bytes(os.getpid()) or limit_bytes)
    request = RunRequest(
        args, command, user, is_member, limit_bytes, None, WholeWatch(), has_donors
    )
    planned = PlanRuns(request, past, has_donors)
    try:
        with ending_signals_raise():
            code = with_device(request, config, planned.all)
    except EndingSignal as error:
        return 128 + error.number
    if planned.plan is not None:
        show(args, planned.plan)
    return code


def _choose_size(args: argparse.Namespace, config: configuration.Config) -> bool:
    """Whether there are donors. Without them the device gets a size that `run` would refuse to
    choose."""
    from infiniswap.discovery.find import find

    if args.device is not None:
        return True
    try:
        find(config).require()
    except NoDonorError:
        args.size = args.size or str(_DISK_ONLY_BYTES)
        return False
    return True
