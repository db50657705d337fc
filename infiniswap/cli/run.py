# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run`: an unmodified job with far more memory than its limit.

This process prepares and reports. Undoing is the device process's part, which watches this one:
so there is no moment at which being killed leaves anything behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.cli import run_beside
from infiniswap.cli.device import (
    add_device_options,
    backup_path,
    load_config,
    make_spec,
    prepare_backup_dir,
)
from infiniswap.cli.parser import named
from infiniswap.cli.run_local import Local, parse_local
from infiniswap.cli.run_output import LiveLine, say
from infiniswap.device.api import DeviceStatus
from infiniswap.device.cleanup import lost
from infiniswap.device.control import client, launch, member
from infiniswap.device.jobs import account, beside, job, usage
from infiniswap.device.process import runs
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import named_text
from infiniswap.discovery.find import find
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    InfiniswapError,
    MemoryLimitError,
    NotPermittedError,
    UsageError,
)
from infiniswap.system import swap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.job_cgroup import create_job_cgroup
from infiniswap.units import HostPort, format_size, format_size_short, parse_page_size

KILLED: Final = 128 + signal.SIGKILL
_UNREADABLE: Final = 128 + signal.SIGBUS

_DISK_SHARE = 0.8
_LOCAL_TIMES = 4
_JOIN_PAUSE_S = 0.2
_JOIN_S_MAX = launch.START_S_MAX + 10.0
_WAIT_TOLD_S = 3.0
_END_S_MAX = 10.0


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a command with more memory than its limit",
        description="Runs COMMAND with at most --local of this host's memory; what does not fit "
        "is paged to donors. Its signals and exit code are passed through. Everything is undone "
        "when it ends, however it ends. Needs root; under sudo COMMAND runs as the user who "
        "called it. Members of the group infiniswap need no root with --device.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--local",
        required=True,
        metavar="SIZE",
        help="memory limit of the job, such as 4G; 50%% is half of this host's memory, or of what "
        "a cgroup around this shell may use where that is less",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--device", metavar="NAME", help="page to this running swap device")
    which.add_argument(
        "--size",
        metavar="SIZE",
        help="of the swap device (default: 4 times --local, or what donors and disk allow)",
    )
    add_device_options(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument("--quiet", action="store_true", help="no notes, live line and summary")
    parser.add_argument("--summary-json", metavar="FILE", help="write the summary there")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="[--] COMMAND...")


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
    user = None if is_member else job.invoking_user(os.environ)
    job.check_command(command, user)
    config = load_config(args)
    if local.note and not args.quiet:
        say(local.note)
    if user is not None and not args.quiet:
        say(f"the command runs as {user.name}, who called sudo")
    try:
        with _ending_signals_raise(), _summary_file(args.summary_json, user) as summary_file:
            this = _Run(args, command, user, is_member, local.limit_bytes, summary_file)
            return _run_with_device(this, config)
    except _EndingSignal as error:
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
    local = parse_local(args.local)
    if args.size is not None:
        with named("--size"):
            parse_page_size(args.size)
    if args.device is not None:
        for name in ("donors", "frontend", "backup", "transport", "slab", "staging"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} does not go with --device: that device has its own",
                    mend="Leave out one of the two.",
                )
    return local


@dataclass(frozen=True, slots=True)
class _Run:
    """What was asked for.

    Attributes:
        is_member: not root, so that the device does what needs root.
    """

    args: argparse.Namespace
    command: list[str]
    user: job.User | None
    is_member: bool
    local_bytes: int
    summary_file: _SummaryFile | None


class _EndingSignal(BaseException):
    """SIGTERM or SIGHUP while there is no job to hand it on to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise_ending_signal(number: int, _frame: FrameType | None) -> None:
    raise _EndingSignal(number)


@contextlib.contextmanager
def _ending_signals_raise() -> Iterator[None]:
    previous = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            previous[number] = signal.signal(number, _raise_ending_signal)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _SummaryFile:
    """The file of --summary-json, opened before anything is set up, so that a mistake is told
    then."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.written = False

    def write(self, summary: dict[str, object]) -> None:
        """Writes it; a full disk is told, and does not change the exit code."""
        data = (json.dumps(summary, indent=2) + "\n").encode()
        try:
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, 0)
            with os.fdopen(os.dup(self._fd), "wb") as file:
                file.write(data)
            self.written = True
        except OSError as error:
            say(f"the summary could not be written: {error.strerror}")


@contextlib.contextmanager
def _summary_file(name: str | None, user: job.User | None) -> Iterator[_SummaryFile | None]:
    if name is None:
        yield None
        return
    with job.acting_as(user):
        is_new = not os.path.lexists(name)
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
        except OSError as error:
            raise UsageError(
                f"--summary-json cannot be written: {error.strerror}",
                where=name,
                mend="Name a file in a directory that you may write to.",
            ) from error
    file = _SummaryFile(fd)
    try:
        yield file
    finally:
        os.close(fd)
        if is_new and not file.written:
            with contextlib.suppress(OSError), job.acting_as(user):
                os.unlink(name)


# --------------------------------------------------------------------------- device


def _run_with_device(this: _Run, config: configuration.Config) -> int:
    paths, joined = _get_device(this, config)
    watch: lost.Watch | None = None
    others = beside.Others(config.device.run_dir, paths.name)
    try:
        before = client.status(paths)
        watch = lost.Watch(paths, before)
        if not this.is_member:
            others.look()
        if not this.args.quiet:
            for line in usage.describe_areas(swap.active_areas(), before.path):
                say(line)
            if others.areas:
                say(usage.describe_others(others.areas.values()))
        return _run_on(this, paths, before, watch, others, joined)
    finally:
        try:
            if not this.is_member:  # whose cgroup's end is the end of the run
                for name in others.lost:
                    _clear_lost(rundir.paths_of(name, paths.run.parent, paths.store))
                held_bytes = 0
                if watch is not None and this.args.device is None:
                    held_bytes = others.held_bytes(watch.path)
                _leave(paths, watch, held_bytes)
        finally:
            others.close()
            if watch is not None:
                watch.close()


def _leave(paths: rundir.DevicePaths, watch: lost.Watch | None, held_bytes: int) -> None:
    """Says goodbye to the device, which ends with its last run; it is not waited for where other
    commands have `held_bytes` there."""
    try:
        client.leave(paths, os.getpid(), wait=not held_bytes)
        if held_bytes:
            say(
                f"{format_size_short(held_bytes)} of other commands lie in the swap device "
                f"{paths.name}: it is removed in the background, when they have room elsewhere"
            )
    except client.DeviceError as error:
        _say_what_remains(paths, error)
    except InfiniswapError as error:
        if watch is None or not watch.ended(_END_S_MAX):
            say(f"the swap device may still be there: {error}")
        elif watch.lost():
            _clear_lost(paths)
    except (KeyboardInterrupt, _EndingSignal):
        say(
            "the swap device is removed in the background; until then `infiniswap device show "
            f"{paths.name}` shows it"
        )
        raise
    else:
        if watch is not None and not rundir.is_running(paths):
            watch.ended(_END_S_MAX)


def _say_what_remains(paths: rundir.DevicePaths, error: InfiniswapError) -> None:
    remains, who = "the swap device", "its process"
    with contextlib.suppress(InfiniswapError):
        status = client.status(paths)
        used = format_size_short(status.swap.used_bytes)
        remains += f" {status.path} ({format_size_short(status.size_bytes)}, {used} in use)"
        who += f" (pid {status.pid})"
    say(f"{remains} cannot be removed yet: {error}")
    say(
        f"the job has ended, and nothing needs to be done: {who} goes on serving the device, and "
        f"tries to remove it every {runs.STOP_PAUSE_S_MAX:.0f} s or sooner, until that has worked; "
        f"`infiniswap device show {paths.name}` shows it"
    )


def _clear_lost(paths: rundir.DevicePaths) -> None:
    try:
        lost.clear(paths)
    except ConflictError as error:
        if not rundir.is_running(paths):  # else another run is doing it
            say(f"not everything could be cleaned up: {error}")
    except InfiniswapError as error:
        say(f"not everything could be cleaned up: {error}")


def _get_device(this: _Run, config: configuration.Config) -> tuple[rundir.DevicePaths, bool]:
    """The device to page to, joined; True when it is not this run's own."""
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    if this.is_member:
        paths = rundir.paths_of(this.args.device, run_dir, backup_dir)
        member.status(paths)  # says what is amiss; it is joined together with the cgroup
        return paths, True
    if this.args.device is not None:
        paths = rundir.require_running(this.args.device, run_dir, backup_dir)
        _join(paths)
        return paths, True
    started_s, told = time.monotonic(), False
    while time.monotonic() - started_s < _JOIN_S_MAX:
        with contextlib.suppress(beside.NotServingError):
            own = _start_device(this, config, beside.running(run_dir, backup_dir))
            if own is not None:
                return own, False
        if not told and time.monotonic() - started_s > _WAIT_TOLD_S:
            say("waiting for the device of another run, which is starting or stopping")
            told = True
        time.sleep(_JOIN_PAUSE_S)
    raise ConflictError(
        f"the device of another run has neither served nor ended for {_JOIN_S_MAX:.0f} s",
        where=str(run_dir),
        mend="The file `log` in that device's directory there says why.",
    )


def _join(paths: rundir.DevicePaths) -> None:
    """Raises ConflictError when it is no swap space; others: see client.join."""
    status = client.status(paths)
    if not status.swap.active:
        raise UsageError(
            "it is not in use as swap space",
            where=f"device {status.name}",
            mend="Use one that was started with `infiniswap device start NAME --swap ...`, or "
            "leave --device out: `run` then makes its own.",
        )
    client.join(paths, os.getpid())


def _start_device(
    this: _Run, config: configuration.Config, others: tuple[beside.RunDevice, ...]
) -> rundir.DevicePaths | None:
    """None when another run was faster."""
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    paths = rundir.paths_of(beside.free_name(run_dir, backup_dir), run_dir, backup_dir)
    args, config = run_beside.like(this.args, config, others, paths.name)
    backup = backup_path(args.backup, paths)
    if args.size is None:
        size_bytes = _choose_size(config, this.local_bytes, backup, quiet=args.quiet)
    else:
        size_bytes = parse_page_size(args.size)
    spec = make_spec(
        args,
        config,
        name=paths.name,
        size_bytes=size_bytes,
        swap=True,
        ephemeral=True,
        owner_pid=os.getpid(),
    )
    spec = run_beside.recorded(spec, others)
    try:
        beside.clear_lost(run_dir, backup_dir)
    except ConflictError:
        return None
    prepare_backup_dir(spec, paths)
    try:
        ready = launch.start(spec, paths)
    except DeadlineError:
        with contextlib.suppress(ConflictError):
            lost.clear(paths, spec)
        raise
    except client.DeviceError as error:
        if error.exit_code == ConflictError.exit_code and rundir.is_running(paths):
            return None
        raise
    if not args.quiet:
        say(f"{format_size(size_bytes)} of swap at {ready.path}, donors " + named_text(spec))
        for warning in ready.warnings:
            say(f"warning: {warning}")
    return paths


def _choose_size(
    config: configuration.Config, local_bytes: int, backup: str | None, *, quiet: bool
) -> int:
    """min(4 x local, what donors can lend, 80 % of free disk), in whole MiB."""
    lendable_bytes, reasons = asyncio.run(_lendable(config, find(config).require()))
    choices = {
        f"{_LOCAL_TIMES} x --local": _LOCAL_TIMES * local_bytes,
        "what the donors can lend": lendable_bytes,
        **_disk_choice(backup),
    }
    size_bytes, why = usage.choose_size(choices)
    if size_bytes == 0:
        if not lendable_bytes and reasons:
            why = f"no donor lends anything now: {reasons}"
        else:
            why += f" comes to {format_size_short(choices[why])}"
        raise MemoryLimitError(
            f"there is no room for a swap device: {why}",
            mend="Give --size, name more donors, or free disk space.",
        )
    if not quiet:
        say(f"device size {format_size_short(size_bytes)}: {why}")
    return size_bytes


def _disk_choice(backup: str | None) -> dict[str, int]:
    """How much the place of the backup can take."""
    if backup is None:
        return {}
    path = Path(backup)
    try:
        if path.is_block_device():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return {f"the size of {path}": os.lseek(fd, 0, os.SEEK_END)}
            finally:
                os.close(fd)
        directory = path.parent
        while not directory.exists():
            directory = directory.parent
        free_bytes = shutil.disk_usage(directory).free
    except OSError:
        return {}  # the device says what is wrong with it
    return {f"{_DISK_SHARE:.0%} of the free disk at {directory}": int(free_bytes * _DISK_SHARE)}


async def _lendable(config: configuration.Config, donors: tuple[HostPort, ...]) -> tuple[int, str]:
    """Bytes, and why some donors lend nothing."""
    from infiniswap.cli.status import ask, lendable

    return lendable(await ask(donors, config.secret(), config.cluster.ask_s))


# ------------------------------------------------------------------------------ job


def _make_cgroup(this: _Run, paths: rundir.DevicePaths) -> MemoryCgroup:
    if this.is_member:
        return member.begin(paths, this.local_bytes)
    return create_job_cgroup(runs.cgroup_name(os.getpid()), this.local_bytes)


def _run_on(
    this: _Run,
    paths: rundir.DevicePaths,
    before: DeviceStatus,
    watch: lost.Watch,
    others: beside.Others,
    joined: bool,
) -> int:
    cgroup = _make_cgroup(this, paths)
    told = account.Account(before)
    try:
        sampler = usage.Sampler(cgroup, before.path)
        with job.block_signals() as signals:
            result, after = _run_job(this, paths, cgroup, signals, sampler, watch, others, told)
    finally:
        runs.end_job(cgroup)
    if after is None:
        return result.exit_code
    told.add(after)
    areas = tuple(others.areas.values())
    shared = joined or len(after.runs) > 1 or bool(areas)
    summary = usage.summarize(
        this.command[0], result, sampler, this.local_bytes, told, after, areas, shared=shared
    )
    if summary.oom_kills:
        say(usage.describe_oom(summary, after.size_bytes))
    if not this.args.quiet:
        for line in usage.describe(summary):
            say(line)
    if this.summary_file is not None:
        this.summary_file.write(asdict(summary))
    return result.exit_code


def _run_job(
    this: _Run,
    paths: rundir.DevicePaths,
    cgroup: MemoryCgroup,
    signals: job.Signals,
    sampler: usage.Sampler,
    watch: lost.Watch,
    others: beside.Others,
    told: account.Account,
) -> tuple[job.JobResult, DeviceStatus | None]:
    """The device's last status is None when it has gone."""
    live = LiveLine(paths, sampler, this.local_bytes, told, enabled=not this.args.quiet)
    started_s = time.monotonic()

    def tick() -> None:
        sampler.sample()
        if not this.is_member:
            others.look()
        if watch.ended():
            _check_device(watch)
        else:
            live.tick()

    with job.own_terminal(this.user) as terminal:
        process = job.start(this.command, cgroup, this.user, signals, terminal)
        try:
            result = job.wait(process, cgroup, signals, tick, terminal)
        except lost.DeviceLostError as error:
            live.clear()
            say(str(error))
            cgroup.kill()
            if terminal is not None:
                terminal.end()
            process.wait()
            return job.JobResult(KILLED, time.monotonic() - started_s), None
        finally:
            live.clear()
    sampler.sample()
    if left := cgroup.pids():
        if not this.args.quiet:
            say(f"the command left {len(left)} process(es) behind; they are ended")
        cgroup.kill()
    if result.exit_code in (KILLED, _UNREADABLE) and others.one_is_gone():
        say("the process of the swap device of another run has died, and with it what was there")
    try:
        return result, client.status_patiently(paths)
    except InfiniswapError as error:
        if not isinstance(error, client.DeviceError):
            watch.ended(_END_S_MAX)  # it no longer answers, so it should be about to end
        # Another run of the same device may clear what was left of it, or have done so.
        unreadable = result.exit_code in (KILLED, _UNREADABLE)
        if watch.lost() or (unreadable and watch.known_ended()):
            say("the process of the swap device has died, and with it what was swapped out")
        elif watch.ended():
            say("the swap device was stopped while the command ran; there is no summary")
        else:
            say(f"there is no summary: {error}")
        return result, None


def _check_device(watch: lost.Watch) -> None:
    if watch.lost():
        raise lost.DeviceLostError(
            "the process of the swap device has died, and with it what was swapped out: the "
            "command cannot go on and is ended"
        )
