# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan`: how long a job takes at each memory limit, from two runs of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import stat
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from infiniswap import config as configuration
from infiniswap.cli.common.output import results_console
from infiniswap.cli.common.parser import add_shared
from infiniswap.cli.device.options import load_config
from infiniswap.cli.run import add_device_choice, check_device, with_device
from infiniswap.errors import InfiniswapError, NoDonorError, NotPermittedError, UsageError

if TYPE_CHECKING:
    from infiniswap.cli.run.job import Paging
    from infiniswap.cli.run.request import RunRequest
    from infiniswap.planning.prediction import Point, Probe
    from infiniswap.planning.report import Planned
    from infiniswap.planning.watch import LimitedWatch, WholeWatch

_SHORT_S: Final = 1.0
_UNSURE: Final = 0.5
_UNSURE_NOTE: Final = (
    "the second run moved too few pages to tell what a page costs this job: the times rest on "
    "earlier plans on this host, or on 60 µs a page where there are none"
)
_SURE_SHARE: Final = 0.9
_LOWEST: Final = 25
_DISK_ONLY_BYTES: Final = 2**30
_OPTIONS: Final = (
    *("config", "donors", "secret_file", "frontend", "backup", "transport", "slab", "tenant"),
    *("staging", "size", "device"),
)
"""That `run` has, too, and that the command to type repeats."""


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "plan",
        help="predict how long a command takes at each memory limit",
        description="Runs COMMAND twice: without a limit, then with half of the memory that it "
        "used, until it has lost four times the time of the first run. "
        "Predicts its time at every limit with the donors and the disk as they are, and names "
        "the smallest --local for a slowdown.",
    )
    parser.add_argument(
        "--slowdown",
        type=float,
        default=1.1,
        metavar="X",
        help="recommend the smallest limit at which the command takes at most X times as long "
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
    parser.set_defaults(quiet=True, local="", summary_json=None)


def run(args: argparse.Namespace) -> int:
    """Plans; returns the exit code."""
    from infiniswap.planning import history

    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    _check(args, command)
    config = load_config(args)
    past = history.path_in(config.daemon.state_dir)
    if args.forget:
        count = history.forget(past)
        print(f"forgot {count} measurements of earlier plans", file=sys.stderr)
        if not command and args.pid is None:
            return 0
    if args.pid is not None:
        return _process(args)
    return _command(args, config, command, past)


def _check(args: argparse.Namespace, command: list[str]) -> None:
    """Raises UsageError for arguments that make no sense."""
    if not args.slowdown > 1.0:
        raise UsageError(f"{args.slowdown:g} is not above 1", where="--slowdown")
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
    if command and not _can_read_twice():
        raise UsageError(
            "standard input is a pipe, which only the first of the two runs could read",
            mend="Give the input as a file: infiniswap plan -- COMMAND <FILE.",
        )


def _can_read_twice() -> bool:
    mode = os.fstat(0).st_mode
    return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


# ------------------------------------------------------------------------ a running process


def _process(args: argparse.Namespace) -> int:
    from rich.table import Table

    from infiniswap.planning import process
    from infiniswap.units import format_size_short as short

    process.require(args.pid)
    cgroup = process.cgroup_of(args.pid) if args.probe else None
    used = list(process.working_set(args.pid))
    steps = [] if cgroup is None else list(process.probe(args.pid, cgroup))
    if args.json:
        _print_json(
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


# -------------------------------------------------------------------------------- a command


def _command(
    args: argparse.Namespace, config: configuration.Config, command: list[str], past: Path
) -> int:
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
    planning = _Planning(request, past, has_donors)
    try:
        with ending_signals_raise():
            code = with_device(request, config, planning.both)
    except EndingSignal as error:
        return 128 + error.number
    if planning.plan is not None:
        _show(args, planning.plan)
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


class _Planning:
    """The two runs, on one device.

    Args:
        request: of the first run.
        past: file of the history.
        has_donors: whether any are named.

    Attributes:
        plan: the result; None: the device has gone.
    """

    def __init__(self, request: RunRequest, past: Path, has_donors: bool) -> None:
        self._request = request
        self._past = past
        self._has_donors = has_donors
        self._probe: Probe | None = None
        self._notes: list[str] = []
        self.plan: Planned | None = None

    def both(self, request: RunRequest, paging: Paging) -> int:
        """Runs the job twice; returns the exit code of the first run."""
        from infiniswap.cli.run.job import run as run_job
        from infiniswap.cli.run.live_line import say
        from infiniswap.planning.watch import LimitedWatch, WholeWatch

        whole = request.follower
        assert isinstance(whole, WholeWatch)
        say("plan: run 1 of 2, without a limit")
        code = run_job(request, paging)
        if whole.summary is None:
            return code
        limited: LimitedWatch | None = None
        if code == 0 and whole.summary.elapsed_s >= _SHORT_S:
            limited = LimitedWatch(whole, paging.before.path, request.local_bytes)
            say(f"plan: run 2 of 2, with {limited.limit_bytes >> 20} MiB")
            _rewind()
            self._second(replace(request, follower=limited), paging, limited)
        self.plan = self._made(code, whole, limited)
        return code

    def _second(self, request: RunRequest, paging: Paging, limited: LimitedWatch) -> None:
        from infiniswap.cli.run.job import run as run_job
        from infiniswap.device.control import client
        from infiniswap.system.block_trace import BlockTrace

        request = replace(request, local_bytes=limited.limit_bytes)
        paging = replace(paging, before=client.status(paging.paths))
        trace: BlockTrace | None = None
        with contextlib.ExitStack() as stack:
            try:
                trace = stack.enter_context(BlockTrace(Path(paging.before.path).stat().st_rdev))
            except InfiniswapError as error:
                self._notes.append(
                    f"the curve is taken to be even, as pages cannot be seen: {error}"
                )
            run_job(request, paging)
        self._probe = limited.probe(None if trace is None else trace.events())

    def _made(self, code: int, whole: WholeWatch, limited: LimitedWatch | None) -> Planned:
        from infiniswap.planning import history
        from infiniswap.planning.prediction import Model, fit, measured
        from infiniswap.planning.report import Planned
        from infiniswap.planning.watch import LIMIT_BYTES_MIN

        assert whole.summary is not None
        args, probe, peak = self._request.args, self._probe, whole.peak_bytes
        first_s = whole.summary.elapsed_s
        elapsed_s = first_s - (probe.ahead_s if probe else 0.0)
        notes = [*_notes(code, whole, limited, probe, self._has_donors), *self._notes]
        model: Model | None = None
        best: Point | None = None
        if probe is not None:
            held_bytes = whole.summary.anon_peak_bytes
            past = history.read(self._past)
            model = fit(elapsed_s, peak, probe, past, held_bytes=held_bytes)
            try:
                history.add(self._past, measured(elapsed_s, probe))
            except InfiniswapError as error:
                notes.append(f"later plans will not know what a page costs here: {error}")
            if model.from_history > _UNSURE and any(each.page_ins for each in model.points()):
                notes.append(_UNSURE_NOTE)
            lowest = max(peak * _LOWEST // 100, LIMIT_BYTES_MIN) // 2**20 * 2**20
            best = model.at(max(model.smallest(args.slowdown).limit_bytes, lowest))
        return Planned(
            command=shlex.join(self._request.command),
            exit_code=code,
            elapsed_s=elapsed_s,
            first_elapsed_s=first_s,
            peak_bytes=peak,
            probe_limit_bytes=probe.limit_bytes if probe else None,
            probe_elapsed_s=probe.elapsed_s if probe else 0.0,
            probe_page_ins=probe.page_ins if probe else 0,
            probe_share=probe.share_limited if probe else 0.0,
            page_us=model.page_s * 1e6 if model else 0.0,
            from_history=model.from_history if model else 1.0,
            slowdown=args.slowdown,
            recommended=best,
            type=_to_type(args, best.limit_bytes, self._request.command) if best else "",
            curve=model.points() if model else (),
            notes=notes,
        )


def _rewind() -> None:
    """A file at standard input is read from its beginning again."""
    if stat.S_ISREG(os.fstat(0).st_mode):
        os.lseek(0, 0, os.SEEK_SET)


def _notes(
    code: int,
    whole: WholeWatch,
    limited: LimitedWatch | None,
    probe: Probe | None,
    has_donors: bool,
) -> list[str]:
    """What limits the prediction."""
    found = []
    assert whole.summary is not None
    if not has_donors:
        found.append("no donor is named or announced: this is the curve with the local disk alone")
    if code:
        found.append(f"the command ended with exit code {code}: no time is predicted")
    elif limited is None:
        found.append(
            f"the command ended within {_SHORT_S:g} s, too soon to predict a time: with the memory "
            "above as its limit nothing is paged out"
        )
    elif limited.cut:
        found.append(
            "the second run lost more than eight times the time of the first, and was ended: no "
            "time is predicted"
        )
    elif probe is None:
        how = "" if limited.summary is None else f" with exit code {limited.summary.exit_code}"
        found.append(f"the second run ended{how}: no time is predicted")
    elif probe.share_limited < _SURE_SHARE:
        found.append(
            f"only {probe.share_limited:.0%} of the job ran with a limit: the curve takes the rest "
            "to be alike"
        )
    if whole.summary.swap_peak_bytes:
        found.append("the run without a limit was paged out, too: this host is short of memory")
    return found


def _to_type(args: argparse.Namespace, limit_bytes: int, command: list[str]) -> str:
    options = [
        word
        for name in _OPTIONS
        if (value := getattr(args, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    if args.allow_data_loss:
        options.append("--allow-data-loss")
    local = f"{-(-limit_bytes // 2**20)}M"
    return shlex.join(["infiniswap", "run", "--local", local, *options, "--", *command])


def _show(args: argparse.Namespace, plan: Planned) -> None:
    from infiniswap.planning import report

    if args.plot is not None and plan.curve:
        report.draw(plan, args.plot)
    if args.json:
        _print_json(asdict(plan))
        return
    console = results_console()
    if plan.curve:
        console.print(report.table(plan), highlight=False, markup=False)
    for line in report.lines(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_json(found: dict[str, Any]) -> None:
    import json

    json.dump(found, sys.stdout, indent=2)
    print()
