# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run`: an unmodified job with far more memory than its limit."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.cli.device import (
    add_device_options,
    load_config,
    make_spec,
    prepare_backup_dir,
)
from infiniswap.device import client, job, launch, rundir
from infiniswap.device.api import DeviceStatus
from infiniswap.device.spec import NAME_LENGTH_MAX
from infiniswap.errors import (
    ConflictError,
    InfiniswapError,
    MemoryLimitError,
    NoDonorError,
    NotPermittedError,
    UsageError,
)
from infiniswap.system import swap
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup, run_cgroup_name
from infiniswap.units import (
    MIB,
    PAGE_BYTES,
    format_size,
    format_size_short,
    parse_page_size,
)

SHARED_NAME: Final = "run"
"""Name of the device that `run` makes, and that further ones join."""

_LOCAL_BYTES_MIN = 16 * MIB
_DISK_SHARE = 0.8
_LOCAL_TIMES = 4
_JOIN_TRIES = 50


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a command with more memory than its limit",
        description="Runs COMMAND with at most --local of this host's memory; what does not fit "
        "is paged to donors. Its signals and exit code are passed through. Everything is undone "
        "when it ends, however it ends.",
        allow_abbrev=False,
    )
    parser.add_argument("--local", required=True, metavar="SIZE", help="memory limit of the job")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--device", metavar="NAME", help="page to this running swap device")
    which.add_argument(
        "--size",
        metavar="SIZE",
        help="of the swap device (default: 4 times --local, or what donors and disk allow)",
    )
    add_device_options(parser)
    parser.add_argument("--config", metavar="FILE", help="configuration file")
    parser.add_argument("--quiet", action="store_true", help="no live line and no summary")
    parser.add_argument("--summary-json", metavar="FILE", help="write the summary there")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="[--] COMMAND...")


@dataclass(frozen=True, slots=True)
class Summary:
    """What `run` tells at the end; pages are counted as bytes.

    `page_in_*` are the device's, so with several runs on one device they are those of all.
    """

    command: str
    exit_code: int
    elapsed_s: float
    local_bytes: int
    anon_peak_bytes: int
    oom_kills: int
    page_in_bytes: int
    page_out_bytes: int
    page_in_remote_bytes: int
    page_in_staging_bytes: int
    page_in_backup_bytes: int
    remote_share: float | None
    page_in_us_p50: float
    page_in_us_p99: float
    other_swap_bytes: int
    device: str
    shared: bool


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit code."""
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise UsageError(
            "there is no command to run",
            mend="For example: infiniswap run --local 4G --donors HOST -- python prep.py",
        )
    local_bytes = parse_page_size(args.local)
    if local_bytes < _LOCAL_BYTES_MIN:
        raise UsageError(
            f"--local {args.local} is too little for any program",
            mend=f"Give at least {format_size(_LOCAL_BYTES_MIN)}.",
        )
    if os.geteuid() != 0:
        raise NotPermittedError(
            "`infiniswap run` sets up swap space and a memory limit, which needs root",
            mend=f"Run it with sudo: sudo infiniswap run --local {args.local} ... - the command "
            "itself then runs as you.",
        )
    user = job.invoking_user(os.environ)
    config = load_config(args)
    paths, shared = _get_device(args, config, local_bytes)
    try:
        return _run_on(args, command, user, local_bytes, paths, shared)
    finally:
        try:
            client.leave(paths, os.getpid())
        except InfiniswapError as error:
            _say(f"the device is still there: {error}")


def _say(text: str) -> None:
    print(f"infiniswap: {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------- device


def _get_device(
    args: argparse.Namespace, config: configuration.Config, local_bytes: int
) -> tuple[rundir.DevicePaths, bool]:
    """The device to page to, joined; True when it is shared with others."""
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    if args.device is not None:
        paths = rundir.require_running(args.device, run_dir, backup_dir)
        if not client.status(paths).swap.active:
            raise ConflictError(
                "it is not in use as swap space",
                where=f"device {args.device}",
                mend=f"Start it with --swap: infiniswap device start {args.device} --swap ...",
            )
        client.join(paths, os.getpid(), "")
        return paths, True
    paths = rundir.paths_of(SHARED_NAME, run_dir, backup_dir)
    for _ in range(_JOIN_TRIES):
        if rundir.is_running(paths):
            try:
                client.join(paths, os.getpid(), "")
            except InfiniswapError:
                time.sleep(0.2)  # starting or stopping at this moment
                continue
            if args.size is not None and not args.quiet:
                _say("another run's device is in use already; it is shared, --size has no effect")
            return paths, True
        if _start_device(args, config, local_bytes, paths):
            return paths, False
    raise ConflictError(
        "the device of another run neither serves nor ends",
        where=str(paths.run),
        mend=f"See {paths.log}.",
    )


def _start_device(
    args: argparse.Namespace,
    config: configuration.Config,
    local_bytes: int,
    paths: rundir.DevicePaths,
) -> bool:
    """False when another run was faster."""
    size_bytes = (
        _choose_size(config, local_bytes) if args.size is None else parse_page_size(args.size)
    )
    assert len(SHARED_NAME) <= NAME_LENGTH_MAX
    spec = make_spec(
        args,
        config,
        name=SHARED_NAME,
        size_bytes=size_bytes,
        swap=True,
        ephemeral=True,
        owner_pid=os.getpid(),
    )
    prepare_backup_dir(spec, paths)
    others = list(swap.active_areas())
    try:
        ready = launch.start(spec, paths)
    except client.DeviceError as error:
        if error.exit_code == ConflictError.exit_code and rundir.is_running(paths):
            return False
        raise
    if not args.quiet:
        _say(
            f"{format_size(size_bytes)} of swap at {ready.path}, donors "
            + ", ".join(str(donor) for donor in config.cluster.peers)
        )
        for warning in ready.warnings:
            _say(f"warning: {warning}")
        for area in others:
            _say(
                f"note: swap is host-wide; {area.path} (priority {area.priority}) is used when "
                "ours is full"
            )
    return True


def _choose_size(config: configuration.Config, local_bytes: int) -> int:
    """min(4 x local, what donors can lend, 80 % of free disk), in whole MiB."""
    lendable_bytes = asyncio.run(_lendable_bytes(config))
    backup_dir = config.device.backup_dir
    while not backup_dir.exists():
        backup_dir = backup_dir.parent
    disk_bytes = int(shutil.disk_usage(backup_dir).free * _DISK_SHARE)
    choices = {
        f"{_LOCAL_TIMES} x --local": _LOCAL_TIMES * local_bytes,
        "what the donors can lend": lendable_bytes,
        f"{_DISK_SHARE:.0%} of the free disk at {backup_dir}": disk_bytes,
    }
    why = min(choices, key=lambda name: choices[name])
    size_bytes = choices[why] // MIB * MIB
    if size_bytes < MIB:
        raise MemoryLimitError(
            f"there is no room for a swap device: {why} is {format_size_short(choices[why])}",
            mend="Give --size, add donors, or free disk space.",
        )
    _say(f"device size {format_size_short(size_bytes)} ({why})")
    return size_bytes


async def _lendable_bytes(config: configuration.Config) -> int:
    from infiniswap.cli.status import ask

    if not config.cluster.peers:
        raise NoDonorError(
            "no donor is named",
            mend="Give --donors HOST[:PORT],... or set `peers` under [cluster] in the "
            "configuration.",
        )
    rows = await ask(config.cluster.peers, config.secret(), config.cluster.ask_s)
    found = [row.status for row in rows if row.status is not None]
    if not found:
        failures = [row.failure for row in rows if row.failure is not None]
        if len(failures) == 1:
            raise failures[0]
        raise NoDonorError("none of the donors can be reached: " + "; ".join(map(str, failures)))
    return sum(status.pool.can_map * status.slab_bytes for status in found)


# ------------------------------------------------------------------------------ job


def _run_on(
    args: argparse.Namespace,
    command: list[str],
    user: job.User | None,
    local_bytes: int,
    paths: rundir.DevicePaths,
    shared: bool,
) -> int:
    before = client.status(paths)
    others_before_bytes = _other_swap_bytes(before)
    cgroup = create_memory_cgroup(run_cgroup_name(str(os.getpid())), local_bytes)
    try:
        client.join(paths, os.getpid(), str(cgroup.path))
        with job.block_signals():
            started_s = time.monotonic()
            process = job.start(command, cgroup, user)
            live = _LiveLine(paths, cgroup, local_bytes, enabled=not args.quiet)
            result = job.wait(process, cgroup, started_s, live.tick)
            live.clear()
            left = cgroup.pids()
            if left:
                _say(f"the command left {len(left)} processes behind; they are ended")
        after = client.status(paths)
        summary = _summarize(
            command, local_bytes, result, before, after, others_before_bytes, shared
        )
    finally:
        cgroup.kill()
        cgroup.remove()
    if result.oom_kills:
        _explain_oom(after, local_bytes, result)
    if not args.quiet:
        _print_summary(summary)
    if args.summary_json:
        Path(args.summary_json).write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return result.exit_code


def _other_swap_bytes(status: DeviceStatus) -> int:
    own = os.path.realpath(status.path)
    return sum(area.used_bytes for area in swap.active_areas() if str(area.path) != own)


def _summarize(
    command: list[str],
    local_bytes: int,
    result: job.JobResult,
    before: DeviceStatus,
    after: DeviceStatus,
    others_before_bytes: int,
    shared: bool,
) -> Summary:
    def grown(key: str) -> int:
        return (after.stats[key] - before.stats[key]) * PAGE_BYTES

    remote, staging = grown("pages_in_remote"), grown("pages_in_staging")
    backup = grown("pages_in_backup")
    served = remote + staging + backup
    return Summary(
        command=command[0],
        exit_code=result.exit_code,
        elapsed_s=round(result.elapsed_s, 3),
        local_bytes=local_bytes,
        anon_peak_bytes=result.anon_peak_bytes,
        oom_kills=result.oom_kills,
        page_in_bytes=grown("pages_in"),
        page_out_bytes=grown("pages_out"),
        page_in_remote_bytes=remote,
        page_in_staging_bytes=staging,
        page_in_backup_bytes=backup,
        remote_share=remote / served if served else None,
        page_in_us_p50=after.page_in_us_p50,
        page_in_us_p99=after.page_in_us_p99,
        other_swap_bytes=max(0, _other_swap_bytes(after) - others_before_bytes),
        device=after.path,
        shared=shared,
    )


def _explain_oom(after: DeviceStatus, local_bytes: int, result: job.JobResult) -> None:
    full = after.swap.used_bytes > 0.95 * after.size_bytes
    _say(
        f"the kernel killed {result.oom_kills} process(es) of the job: "
        + (
            f"the swap device of {format_size_short(after.size_bytes)} is full. Give a larger "
            "--size."
            if full
            else f"its limit of {format_size_short(local_bytes)} (--local) ran out and nothing "
            "more could be paged out in time. Give a larger --local."
        )
    )


def _print_summary(s: Summary) -> None:
    served = s.page_in_remote_bytes + s.page_in_staging_bytes + s.page_in_backup_bytes

    def share(part: int) -> str:
        return f"{part / served:.1%}" if served else "-"

    _say(
        f"{s.command}: exit code {s.exit_code} after {s.elapsed_s:.1f} s, peak memory "
        f"{format_size_short(s.anon_peak_bytes)} with {format_size_short(s.local_bytes)} local"
    )
    _say(
        f"paged out {format_size_short(s.page_out_bytes)}, in {format_size_short(s.page_in_bytes)}"
        f" (donors {share(s.page_in_remote_bytes)}, staging {share(s.page_in_staging_bytes)}, "
        f"disk {share(s.page_in_backup_bytes)}); page-in p50 {s.page_in_us_p50:.0f} µs, "
        f"p99 {s.page_in_us_p99:.0f} µs" + (" (shared device)" if s.shared else "")
    )
    if s.other_swap_bytes:
        _say(f"{format_size_short(s.other_swap_bytes)} went to other swap areas of this host")


class _LiveLine:
    """One line on a terminal, rewritten once a second."""

    def __init__(
        self, paths: rundir.DevicePaths, cgroup: MemoryCgroup, local_bytes: int, *, enabled: bool
    ) -> None:
        self._paths = paths
        self._cgroup = cgroup
        self._local_bytes = local_bytes
        self._enabled = enabled and sys.stderr.isatty()
        self._next_s = time.monotonic() + 1.0
        self._shown = False

    def tick(self) -> None:
        """Called often; shows at most once a second."""
        if not self._enabled or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + 1.0
        try:
            status = client.status(self._paths)
        except InfiniswapError:
            return
        memory = self._cgroup.memory()
        share = "" if status.remote_share is None else f", {status.remote_share:.0%} from donors"
        text = (
            f"infiniswap: {format_size_short(memory.anon_bytes)} of "
            f"{format_size_short(self._local_bytes)} local, "
            f"{format_size_short(memory.swap_bytes or 0)} paged out, page-in "
            f"{format_size_short(status.stats['pages_in'] * PAGE_BYTES)}{share}"
        )
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
