# SPDX-License-Identifier: Apache-2.0
"""The job of a run, from its cgroup to its summary."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from typing import Final

from infiniswap.cli.run import far
from infiniswap.cli.run.device import END_S_MAX
from infiniswap.cli.run.files_first import FilesFirst
from infiniswap.cli.run.live_line import LiveLine, say
from infiniswap.cli.run.request import RunRequest
from infiniswap.device.api import DeviceStatus
from infiniswap.device.cleanup import lost
from infiniswap.device.control import client, member_client
from infiniswap.device.jobs import (
    account,
    beside,
    closing,
    cost,
    job,
    other_areas,
    summary,
    usage,
)
from infiniswap.device.jobs.attendant import Attendant
from infiniswap.device.jobs.job import KILLED
from infiniswap.device.process import runs
from infiniswap.device.spec import rundir
from infiniswap.errors import InfiniswapError
from infiniswap.system import swap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.job_cgroup import create_job_cgroup
from infiniswap.system.kernel_log import KernelLog
from infiniswap.system.process import named
from infiniswap.units import counted

_UNREADABLE: Final = 128 + signal.SIGBUS


class _EnoughSeenError(Exception):
    """The follower needs no more of the job."""


@dataclass(frozen=True, slots=True)
class Paging:
    """Where a job's pages go.

    Attributes:
        paths: of the device.
        before: its status before the job.
        watch: of its process.
        others: devices of other runs, where pages of this one may lie, too.
        joined: whether it is not this run's own.
    """

    paths: rundir.DevicePaths
    before: DeviceStatus
    watch: lost.Watch
    others: beside.Others
    joined: bool


def run(request: RunRequest, paging: Paging) -> int:
    """Runs the job and sums up; returns its exit code."""
    cgroup = _make_cgroup(request, paging.paths)
    told, log = account.Account(paging.before), KernelLog()
    try:
        sampler = usage.Sampler(cgroup, paging.before.path)
        with job.block_signals() as signals:
            result, after = _run_job(request, paging, cgroup, signals, sampler, told)
        sampler.look_for_swapoff(log)
    finally:
        log.close()
        runs.end_job(cgroup)
    if after is None:
        return result.exit_code
    told.add(after)
    found = _summarize(request, paging, result, sampler, told, after)
    if request.follower is not None:
        request.follower.ended(found)
    if not request.args.quiet:
        for line in closing.describe(found):
            say(line)
    elif found.oom_kills:
        say(closing.describe_oom(found))
    if request.summary_file is not None:
        request.summary_file.write(asdict(found))
    return result.exit_code


def _summarize(
    request: RunRequest,
    paging: Paging,
    result: job.JobResult,
    sampler: usage.Sampler,
    told: account.Account,
    after: DeviceStatus,
) -> summary.Summary:
    areas = tuple(paging.others.areas.values())
    sealed: dict[str, bool] = {}
    if sampler.peaks.others:
        sealed = other_areas.sealed_by_path(swap.active_areas(), paging.paths.run.parent)
    return summary.summarize(
        request.command[0],
        result,
        sampler,
        request.local_bytes,
        told,
        after,
        areas,
        shared=paging.joined or len(after.runs) > 1 or bool(areas),
        sealed=sealed,
        cost=None if paging.joined else _cost(after, told),
        unfit="" if request.far is None else request.far.unfit,
    )


def _cost(after: DeviceStatus, told: account.Account) -> cost.Cost | None:
    return cost.measured(after, told.donors_bytes_max, far_processes=told.far_processes_max)


def _run_job(
    request: RunRequest,
    paging: Paging,
    cgroup: MemoryCgroup,
    signals: job.Signals,
    sampler: usage.Sampler,
    told: account.Account,
) -> tuple[job.JobResult, DeviceStatus | None]:
    """The device's last status is None when it has gone."""
    paths, watch, others = paging.paths, paging.watch, paging.others
    live = LiveLine(paths, sampler, request.local_bytes, told, enabled=not request.args.quiet)
    attendant = Attendant(cgroup, wanted=not request.is_member)
    files = FilesFirst(cgroup, wanted=request.far is not None and not request.far.unfit)
    started_s = time.monotonic()

    def tick() -> None:
        sampler.far_bytes = told.far_bytes
        sampler.sample()
        swapped_bytes = 0 if sampler.memory is None else sampler.memory.swap_bytes or 0
        files.look(0 if told.far_pauses else told.far_bytes, swapped_bytes)
        attendant.look(sampler.peaks.swap)
        if not request.is_member:
            others.look()
        if watch.ended():
            _check_device(watch)
        else:
            live.tick()
        if request.follower is not None and request.follower.look(cgroup):
            raise _EnoughSeenError

    with job.own_terminal(request.user) as terminal:
        live.follow(terminal)
        with far.inherited(request.far, paths, cgroup, request.user) as preload:
            process = job.start(request.command, cgroup, request.user, signals, terminal, preload)
        try:
            result = job.wait(process, cgroup, signals, tick, terminal, live.clear)
        except lost.DeviceLostError as error:
            live.clear()
            say(str(error))
            _kill(cgroup)
            if terminal is not None:
                terminal.end()
            process.wait()
            return _ended_by_us(started_s), None
        except _EnoughSeenError:
            _kill(cgroup)
            if terminal is not None:
                terminal.end()
            process.wait()
            result = _ended_by_us(started_s)
        finally:
            attendant.end()
            live.clear()
    sampler.sample()
    if left := cgroup.pids():
        if not request.args.quiet:
            say(f"the command left {counted(len(left), 'process')} behind, which `run` ends")
        _kill(cgroup)
    if result.exit_code in (KILLED, _UNREADABLE) and others.one_is_gone():
        say("the process of the swap device of another run has died, and with it what was there")
        result = replace(result, is_explained=True)
    return result, _last_status(paths, watch, is_broken=result.exit_code in (KILLED, _UNREADABLE))


def _last_status(
    paths: rundir.DevicePaths, watch: lost.Watch, *, is_broken: bool
) -> DeviceStatus | None:
    """None when the device has gone, after saying how; `is_broken`: its job ended as one does
    whose memory is lost."""
    try:
        return client.status_patiently(paths)
    except InfiniswapError as error:
        if not isinstance(error, client.DeviceError):
            watch.ended(END_S_MAX)  # it no longer answers, so it should be about to end
        # Another run of the same device may clear what was left of it, or have done so.
        if watch.lost() or (is_broken and watch.known_ended()):
            say("the process of the swap device has died, and with it what was swapped out")
        elif watch.ended():
            say("the swap device was stopped while the command ran; there is no summary")
        else:
            say(f"there is no summary: {error}")
        return None


def _ended_by_us(started_s: float) -> job.JobResult:
    return job.JobResult(KILLED, time.monotonic() - started_s, is_explained=True)


def _kill(cgroup: MemoryCgroup) -> None:
    """Ends what is in the job's cgroup, and names what its user may not end."""
    cgroup.kill()
    if left := cgroup.pids():
        say(
            f"process {', '.join(named(pid) for pid in left[:10])} has the rights of another user, "
            "who alone can end it: it is left running"
        )


def _make_cgroup(request: RunRequest, paths: rundir.DevicePaths) -> MemoryCgroup:
    if request.is_member:
        return member_client.begin(paths, request.local_bytes)
    return create_job_cgroup(runs.cgroup_name(os.getpid()), request.local_bytes)


def _check_device(watch: lost.Watch) -> None:
    if watch.lost():
        raise lost.DeviceLostError(
            "the process of the swap device has died, and with it what was swapped out: the "
            "command cannot go on and is ended"
        )
