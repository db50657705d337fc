# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run`: an unmodified job with far more memory than its limit.

This process prepares and reports. The device's process watches this one and cleans up, so that
nothing is left behind whenever this one is killed. `far` looks at what --paging far needs, `device`
joins or starts the swap device, `job` runs the command, `live_line` prints meanwhile; `dry_run`
says what they would do. `infiniswap plan` enters by `with_device`, no other module does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from infiniswap import config as configuration
from infiniswap.cli.common.parser import add_shared, named
from infiniswap.cli.device.options import add_device_options, load_config
from infiniswap.cli.run import device, dry_run, far
from infiniswap.cli.run import job as run_job
from infiniswap.cli.run.live_line import say
from infiniswap.cli.run.local import Local, parse_local
from infiniswap.cli.run.request import (
    EndingSignal,
    RunRequest,
    check_summary_file,
    ending_signals_raise,
    open_summary_file,
)
from infiniswap.device.cleanup import lost
from infiniswap.device.control import client
from infiniswap.device.jobs import beside, closing, job, other_areas, sudo
from infiniswap.device.spec import rundir
from infiniswap.errors import NotPermittedError, UsageError
from infiniswap.system import swap
from infiniswap.units import parse_page_size


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a command with more memory than its limit",
        description="Runs COMMAND with at most --local of this host's memory, and pages the rest "
        "to donors. Signals and the exit code of COMMAND are passed through. Everything that was "
        "set up is removed when COMMAND ends, for any reason. Needs root; under sudo COMMAND runs "
        "as the user who called sudo. Members of the group infiniswap need no root with --device.",
    )
    parser.add_argument(
        "--local",
        required=True,
        metavar="SIZE",
        help="memory limit of the job: a size such as 4G, or a share such as 50%% of this host's "
        "memory (of the limit of a cgroup around this shell, where that is lower)",
    )
    parser.add_argument(
        "--paging",
        choices=("far", "swap"),
        default="swap",
        help="how memory leaves: swap is the kernel's, page by page; far also moves the command's "
        "large memory in blocks of 2 MiB by a library in its programs (default swap)",
    )
    add_device_choice(parser, "4 times --local, less where donors or the disk have less room")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: check everything, and print donors, slabs, disk and priority",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: print JSON, for programs"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print no notes, no live line and no summary"
    )
    parser.add_argument(
        "--summary-json", metavar="FILE", help="write the summary to this file as JSON"
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="[--] COMMAND...")


def add_device_choice(parser: argparse.ArgumentParser, size_default: str) -> None:
    """Options that say which device a job pages to; `plan` has them, too."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--device", metavar="NAME", help="page to this running swap device instead of making one"
    )
    which.add_argument(
        "--size",
        metavar="SIZE",
        help=f"size of the swap device (default: {size_default})",
    )
    add_device_options(parser)
    add_shared(parser, "--config")


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit code."""
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    local = _check(args, command)
    is_member = os.geteuid() != 0
    if is_member and args.device is None:
        raise NotPermittedError(
            "`infiniswap run` sets up swap space and a memory limit, which needs root",
            mend=f"Run it with sudo: sudo infiniswap run --local {args.local} ... - the command "
            "itself then runs as you. Without root it needs a device that an administrator has "
            "started: --device NAME.",
        )
    user = None if is_member else sudo.invoking_user(os.environ)
    job.check_command(command, user)
    wish = far.wanted(args, command, user, local.limit_bytes)
    config = load_config(args)
    if local.note and not args.quiet:
        say(local.note)
    if user is not None and not args.quiet:
        say(f"the command runs as {user.name}, who called sudo")
    if wish is not None and wish.unfit and not args.quiet:
        say(f"warning: {wish.unfit}. It runs with swap alone")
    if args.dry_run:
        check_summary_file(args.summary_json, user)
        request = RunRequest(args, command, user, is_member, local.limit_bytes, None, far=wish)
        return dry_run.run(request, config)
    try:
        with ending_signals_raise(), open_summary_file(args.summary_json, user) as summary_file:
            request = RunRequest(
                args, command, user, is_member, local.limit_bytes, summary_file, far=wish
            )
            return with_device(request, config)
    except EndingSignal as error:
        return 128 + error.number


def _check(args: argparse.Namespace, command: list[str]) -> Local:
    """The local limit.

    Raises:
        UsageError: arguments that make no sense.
    """
    if not command or not command[0]:
        raise UsageError(
            "there is no command to run",
            mend="For example: infiniswap run --local 4G --donors HOST -- python prep.py",
        )
    if args.json and not args.dry_run:
        raise UsageError(
            "--json belongs to --dry-run",
            mend="For the figures of a job as JSON give --summary-json FILE.",
        )
    check_device(args)
    return parse_local(args.local)


def check_device(args: argparse.Namespace) -> None:
    """Raises UsageError for options of the device that make no sense."""
    if args.size is not None:
        with named("--size"):
            parse_page_size(args.size)
    if args.device is not None:
        for name in ("donors", "frontend", "backup", "transport", "slab", "staging", "tenant"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} cannot be used together with --device: that device has its own",
                    mend="Leave out one of the two.",
                )


def with_device(
    request: RunRequest,
    config: configuration.Config,
    jobs: Callable[[RunRequest, run_job.Paging], int] = run_job.run,
) -> int:
    """Runs jobs on the device that the request names, or on one of its own."""
    paths, joined = device.get(request, config)
    watch: lost.Watch | None = None
    others = beside.Others(config.device.run_dir, paths.name)
    try:
        before = client.status(paths)
        watch = lost.Watch(paths, before)
        if not request.is_member:
            others.look()
        if not request.args.quiet:
            areas = swap.active_areas()
            sealed = other_areas.sealed_by_path(areas, config.device.run_dir)
            for line in other_areas.describe(areas, before.path, sealed):
                say(line)
            if others.areas:
                say(closing.describe_others(others.areas.values()))
        return jobs(request, run_job.Paging(paths, before, watch, others, joined))
    finally:
        try:
            if not request.is_member:  # whose cgroup's end is the end of the run
                for name in others.lost:
                    device.clear_lost(rundir.paths_of(name, paths.run.parent, paths.store))
                held_bytes = 0
                if watch is not None and request.args.device is None:
                    held_bytes = others.held_bytes(watch.path)
                device.leave(paths, watch, held_bytes)
        finally:
            others.close()
            if watch is not None:
                watch.close()
