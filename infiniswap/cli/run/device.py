# SPDX-License-Identifier: Apache-2.0
"""The device that a run pages to: joined or started, and left again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from infiniswap import config as configuration
from infiniswap.cli.device.options import backup_path, make_spec, prepare_backup_dir
from infiniswap.cli.run import inherit
from infiniswap.cli.run.live_line import say
from infiniswap.cli.run.request import EndingSignal, RunRequest
from infiniswap.device.api import DeviceStatus
from infiniswap.device.cleanup import leftovers, lost
from infiniswap.device.control import client, launch, member_client
from infiniswap.device.jobs import beside, cost, usage
from infiniswap.device.process import runs
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import FAR_BLOCK_BYTES, DeviceSpec, check_size, named_text
from infiniswap.discovery.find import find
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    InfiniswapError,
    MemoryLimitError,
    UsageError,
)
from infiniswap.units import HostPort, format_size, format_size_short, parse_page_size

_DISK_SHARE = 0.8

_LOCAL_TIMES = 4

_JOIN_PAUSE_S = 0.2

_JOIN_S_MAX = launch.START_S_MAX + 10.0

_WAIT_TOLD_S = 3.0

END_S_MAX = 10.0
"""How long to wait for a device that is about to end."""


def get(request: RunRequest, config: configuration.Config) -> tuple[rundir.DevicePaths, bool]:
    """The device to page to, joined; True when it is not this run's own."""
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    if request.is_member:
        paths = rundir.paths_of(request.args.device, run_dir, backup_dir)
        member_client.status(paths)  # raises if it cannot be used; making the cgroup joins it
        return paths, True
    if request.args.device is not None:
        paths = rundir.require_running(request.args.device, run_dir, backup_dir)
        _join(paths)
        return paths, True
    started_s, told = time.monotonic(), False
    while time.monotonic() - started_s < _JOIN_S_MAX:
        with contextlib.suppress(beside.NotServingError):
            own = _start_device(request, config, beside.running(run_dir, backup_dir))
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
    """Raises UsageError when it is no swap space; others: see client.join."""
    require_swap(client.status(paths))
    client.join(paths, os.getpid())


def require_swap(status: DeviceStatus) -> None:
    """Raises UsageError when the device is no swap space."""
    if not status.swap.active:
        raise UsageError(
            "the device is not in use as swap space",
            where=f"device {status.name}",
            mend="Use one that was started with `infiniswap device start NAME --swap ...`, or "
            "leave --device out: `run` then makes its own.",
        )


def new_spec(
    request: RunRequest, config: configuration.Config, others: tuple[beside.RunDevice, ...]
) -> tuple[DeviceSpec, rundir.DevicePaths, str]:
    """The device that this run would start, its paths, and why it has its size (empty: it was
    asked for). Makes nothing.

    Raises:
        InfiniswapError: arguments contradict each other or another run, or there is no room.
    """
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    paths = rundir.paths_of(beside.free_name(run_dir, backup_dir), run_dir, backup_dir)
    args, config = inherit.like(request.args, config, others, paths.name)
    why = ""
    if args.size is None:
        backup = backup_path(args.backup, paths)
        size_bytes, why = _choose_size(request, config, backup)
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
        job=request.command[0],
    )
    spec = msgspec.structs.replace(spec, needs_donors=request.needs_donors)
    if request.goes_far:
        spec = _with_far_memory(spec)
    return inherit.recorded(spec, others), paths, why


def _start_device(
    request: RunRequest, config: configuration.Config, others: tuple[beside.RunDevice, ...]
) -> rundir.DevicePaths | None:
    """None when another run was faster."""
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    spec, paths, why = new_spec(request, config, others)
    quiet = request.args.quiet
    if why and not quiet:
        say(f"device size {format_size_short(spec.size_bytes)}: {why}")
    try:
        beside.clear_lost(run_dir, backup_dir)
    except ConflictError:
        return None
    prepare_backup_dir(spec, paths)
    try:
        ready = launch.start(spec, paths)
    except (DeadlineError, MemoryLimitError):
        with contextlib.suppress(ConflictError):
            leftovers.clear(paths, spec)
        raise
    except client.DeviceError as error:
        if error.exit_code == ConflictError.exit_code and rundir.is_running(paths):
            return None
        raise
    if not quiet:
        say(f"{format_size(spec.size_bytes)} of swap at {ready.path}, donors " + named_text(spec))
        warnings = [*ready.warnings, *_refused(ready.degraded), *too_dear(spec)]
        for warning in warnings:
            say(f"warning: {warning}")
    return paths


def _refused(degraded: Sequence[str]) -> Iterator[str]:
    """One line of what the host refuses a device: `doctor` has the rest."""
    if degraded:
        names = ", ".join(sentence.partition(":")[0] for sentence in degraded)
        yield f"this host refuses the device {names}: `infiniswap doctor` says what that means"


def too_dear(spec: DeviceSpec) -> Iterator[str]:
    """A warning about a device that cannot save as much memory as it takes."""
    takes_bytes = cost.expected(spec).memory_bytes
    holds_bytes = spec.size_bytes + spec.far_bytes
    if takes_bytes >= holds_bytes:
        yield (
            f"the device takes about {format_size_short(takes_bytes)} of this host's memory, and "
            f"holds at most {format_size_short(holds_bytes)}: it costs more than it saves"
        )


def _with_far_memory(spec: DeviceSpec) -> DeviceSpec:
    """The device with as much far memory as swap: a job may have all that is not local in either.
    Both take slabs and disk as they are used."""
    far_bytes = spec.size_bytes // FAR_BLOCK_BYTES * FAR_BLOCK_BYTES
    if far_bytes == 0:
        raise UsageError(
            f"--paging far needs a --size of at least {format_size(FAR_BLOCK_BYTES)}, not "
            f"{format_size_short(spec.size_bytes)}",
            mend="Give a larger --size, or run it with --paging swap.",
        )
    check_size(spec.size_bytes, spec.config.device.slab_bytes, far_bytes)
    return msgspec.structs.replace(spec, far_bytes=far_bytes)


def _choose_size(
    request: RunRequest, config: configuration.Config, backup: str | None
) -> tuple[int, str]:
    """min(4 x local, what donors can lend, 80 % of free disk), in whole MiB; and which it is. The
    disk holds far memory beside that."""
    local_bytes, areas = request.local_bytes, 2 if request.goes_far else 1
    lendable_bytes, reasons = asyncio.run(_lendable(config, find(config).require()))
    choices = {
        f"{_LOCAL_TIMES} x --local": _LOCAL_TIMES * local_bytes,
        "what the donors can lend": lendable_bytes,
        **{why: size_bytes // areas for why, size_bytes in _disk_choice(backup).items()},
    }
    size_bytes, why = usage.choose_size(choices)
    if size_bytes == 0:
        if not lendable_bytes and reasons:
            why = f"no donor lends anything now: {reasons}"
        else:
            why += f" is {format_size_short(choices[why])}"
        raise MemoryLimitError(
            f"there is no room for a swap device: {why}",
            mend="Give --size, name more donors, or free disk space.",
        )
    return size_bytes, why


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
        return {}  # the start of the device reports what is wrong
    return {f"{_DISK_SHARE:.0%} of the free disk at {directory}": int(free_bytes * _DISK_SHARE)}


async def _lendable(config: configuration.Config, donors: tuple[HostPort, ...]) -> tuple[int, str]:
    """Bytes, and why some donors lend nothing."""
    from infiniswap.cli.status import lendable
    from infiniswap.control.access import client_config
    from infiniswap.watch.asking import ask

    return lendable(await ask(donors, client_config(config, config.cluster.ask_s)))


def leave(paths: rundir.DevicePaths, watch: lost.Watch | None, held_bytes: int) -> None:
    """Says goodbye to the device, which ends with its last run. Does not wait for that end where
    other commands have `held_bytes` there."""
    try:
        client.leave(paths, os.getpid(), wait=not held_bytes)
        if held_bytes:
            say(
                f"{format_size_short(held_bytes)} of other commands lie in the swap device "
                f"{paths.name}: it is removed in the background, once they fit elsewhere"
            )
    except client.DeviceError as error:
        _say_what_remains(paths, error)
    except InfiniswapError as error:
        if watch is None or not watch.ended(END_S_MAX):
            say(f"the swap device may still be there: {error}")
        elif watch.lost():
            clear_lost(paths)
    except (KeyboardInterrupt, EndingSignal):
        say(
            "the swap device is removed in the background; until then `infiniswap device show "
            f"{paths.name}` shows it"
        )
        raise
    else:
        if watch is not None and not rundir.is_running(paths):
            watch.ended(END_S_MAX)


def _say_what_remains(paths: rundir.DevicePaths, error: InfiniswapError) -> None:
    remains, who = "the swap device", "its process"
    with contextlib.suppress(InfiniswapError):
        status = client.status(paths)
        used = format_size_short(status.swap.used_bytes)
        remains += f" {status.path} ({format_size_short(status.size_bytes)}, {used} in use)"
        who += f" (pid {status.pid})"
    say(f"{remains} cannot be removed yet: {error}")
    say(
        f"the job has ended, and you need not do anything: {who} keeps serving the device, and "
        f"tries to remove it at least every {runs.STOP_PAUSE_S_MAX:.0f} s; `infiniswap device show "
        f"{paths.name}` shows it"
    )


def clear_lost(paths: rundir.DevicePaths) -> None:
    """Cleans up behind a device whose process has died; says what could not be removed."""
    try:
        leftovers.clear(paths)
    except ConflictError as error:
        if not rundir.is_running(paths):  # else another run is doing it
            say(f"not everything could be cleaned up: {error}")
    except InfiniswapError as error:
        say(f"not everything could be cleaned up: {error}")
