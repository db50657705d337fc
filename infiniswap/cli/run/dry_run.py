# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run --dry-run`: what a run would do, and the error that it would end with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from infiniswap import config as configuration
from infiniswap.cli.run import device
from infiniswap.cli.run.request import RunRequest
from infiniswap.control.text import printable
from infiniswap.device.api import DeviceStatus, DonorRow
from infiniswap.device.control import client, launch, member_client
from infiniswap.device.jobs import beside, cost
from infiniswap.device.jobs.cost import Cost
from infiniswap.device.jobs.started_by import started_by
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import FAR_BLOCK_BYTES, DeviceSpec
from infiniswap.system.job_cgroup import systemd_makes_them
from infiniswap.system.memory import memory_hierarchy
from infiniswap.units import counted, format_size, format_size_short

if TYPE_CHECKING:
    from infiniswap.device.process.rehearsal import DonorAnswer, Rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The command.

    Attributes:
        runs_as: name of its user.
        cgroup_version: of its memory cgroup; `cgroup_by`: who makes that.
    """

    command: list[str]
    runs_as: str
    local_bytes: int
    cgroup_version: int
    cgroup_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The swap device.

    Attributes:
        joined: whether it runs already.
        size_why: what has decided the size; empty: --size, or it runs already.
        slabs: that it has.
        far_bytes: of far memory, beside the swap area; 0: there is none.
        far_why: why the command has none though --paging far asks for it; empty: nothing.
        backup: file or block device; None: there is none.
        backup_needs_bytes: are taken there at the start.
        backup_free_bytes: are free there; None: a block device, or the device runs already.
        sealed: whether pages leave it sealed.
        priority: of the swap area.
    """

    name: str
    joined: bool
    size_bytes: int
    size_why: str
    slab_bytes: int
    slabs: int
    far_bytes: int
    far_why: str
    backup: str | None
    backup_needs_bytes: int
    backup_free_bytes: int | None
    sealed: bool
    priority: int | None
    frontend: str
    frontend_why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What donors would be told of a new device."""

    job: str
    user: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would do.

    Attributes:
        cost: what the run would take beside --local, at the most; None: the device runs already.
        told: None: the device runs already.
        leftovers: names of devices of killed runs, which the run would take away first.
    """

    job: JobPlan
    device: DevicePlan
    donors: tuple[DonorAnswer, ...]
    cost: Cost | None
    told: Told | None
    leftovers: tuple[str, ...]
    warnings: tuple[str, ...]


def run(request: RunRequest, config: configuration.Config) -> int:
    """Prints what the run would do; returns 0.

    Raises:
        InfiniswapError: what the run would end with.
    """
    plan = make(request, config)
    if request.args.json:
        json.dump(asdict(plan), sys.stdout, indent=2)
        print()
        return 0
    for line in describe(plan):
        print(printable(line))
    return 0


def make(request: RunRequest, config: configuration.Config) -> Plan:
    """The plan; makes nothing else. Blocking, in bounded time.

    Raises:
        InfiniswapError: what the run would end with.
    """
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    if request.is_member:
        paths = rundir.paths_of(request.args.device, run_dir, backup_dir)
        return _joined(request, member_client.status(paths))
    if request.args.device is not None:
        paths = rundir.require_running(request.args.device, run_dir, backup_dir)
        status = client.status(paths)
        device.require_swap(status)
        return _joined(request, status)
    from infiniswap.device.process.rehearsal import rehearse

    others = beside.running(run_dir, backup_dir)
    spec, paths, why = device.new_spec(request, config, others)
    launch.check_limits(spec)
    left = tuple(name for name in rundir.died_names(run_dir) if beside.is_of_run(name))
    return _new(request, spec, why, rehearse(spec, paths), left)


def _job(request: RunRequest) -> JobPlan:
    by = started_by(os.environ, os.geteuid())
    cgroup_by = "systemd" if systemd_makes_them() else "infiniswap"
    return JobPlan(
        command=request.command,
        runs_as=by.user or f"uid {by.uid}",
        local_bytes=request.local_bytes,
        cgroup_version=memory_hierarchy().version,
        cgroup_by="the device's process" if request.is_member else cgroup_by,
    )


def _new(
    request: RunRequest, spec: DeviceSpec, why: str, found: Rehearsal, left: tuple[str, ...]
) -> Plan:
    device_plan = DevicePlan(
        name=spec.name,
        joined=False,
        size_bytes=spec.size_bytes,
        size_why=why,
        slab_bytes=spec.config.device.slab_bytes,
        slabs=spec.slab_count,
        far_bytes=spec.far_bytes,
        far_why="" if request.far is None else request.far.unfit,
        backup=spec.backup,
        backup_needs_bytes=0 if spec.backup is None else spec.engine_bytes,
        backup_free_bytes=found.backup_free_bytes,
        sealed=bool(found.sealed_by),
        priority=found.priority,
        frontend=found.frontend,
        frontend_why=found.why,
    )
    use = spec.use
    return Plan(
        job=_job(request),
        device=device_plan,
        donors=found.donors,
        cost=cost.expected(spec),
        told=Told(job=use.job, user=use.user, tenant=use.tenant),
        leftovers=left,
        warnings=(*found.warnings, *device.too_dear(spec)),
    )


def _joined(request: RunRequest, status: DeviceStatus) -> Plan:
    device_plan = DevicePlan(
        name=status.name,
        joined=True,
        size_bytes=status.size_bytes,
        size_why="",
        slab_bytes=status.slab_bytes,
        slabs=sum(status.slabs.values()),
        far_bytes=0,  # --device and --paging far exclude each other
        far_why="",
        backup=status.backup,
        backup_needs_bytes=0,
        backup_free_bytes=None,
        sealed=status.sealed,
        priority=status.swap.priority,
        frontend=status.frontend,
        frontend_why="as it was started",
    )
    return Plan(
        job=_job(request),
        device=device_plan,
        donors=tuple(map(_donor_of, status.donors)),
        cost=None,
        told=None,
        leftovers=(),
        warnings=tuple(status.alarms),
    )


def _donor_of(row: DonorRow) -> DonorAnswer:
    from infiniswap.device.process.rehearsal import DonorAnswer

    return DonorAnswer(
        address=row.address,
        name=row.name,
        slabs=row.slabs,
        transport=row.transport,
        problem="" if row.state in _USABLE else row.detail or row.state,
    )


_USABLE: Final = frozenset({"idle", "mapped"})
"""States of a donor (DonorRow) in which it gets slabs."""


# -------------------------------------------------------------------------------- text


def describe(plan: Plan) -> Iterator[str]:
    """For people, a fact a line."""
    job, its, told = plan.job, plan.device, plan.told
    limit = format_size_short(job.local_bytes)
    yield f"command    {job.command[0]}, as {job.runs_as}, with at most {limit} of this host"
    yield f"cgroup     version {job.cgroup_version}, made by {job.cgroup_by}"
    state = "which runs" if its.joined else "new"
    why = f" ({its.size_why})" if its.size_why else ""
    slabs = f"{counted(its.slabs, 'slab')} of {format_size(its.slab_bytes)}"
    yield f"device     {its.name}, {state}: {format_size(its.size_bytes)}{why}, {slabs}"
    if its.far_bytes:
        yield (
            f"far        {format_size(its.far_bytes)} beside that for memory that leaves in blocks "
            f"of {format_size(FAR_BLOCK_BYTES)}"
        )
    if its.far_why:
        yield f"far        none: {its.far_why}. It would run with swap alone"
    for donor in plan.donors:
        yield f"donor      {_donor(its, donor)}"
    yield f"backup     {_backup(its)}"
    if plan.cost is not None:
        yield f"cost       {_cost(plan.cost, its)}"
    yield f"pages      {'sealed' if its.sealed else 'not sealed'} before they leave this host"
    yield f"swap       priority {its.priority}"
    yield f"front end  {its.frontend} ({its.frontend_why})"
    if told is not None:
        names = f"job {told.job or '-'}, user {told.user or '-'}, tenant {told.tenant or '-'}"
        yield f"told       donors: {names}"
    for name in plan.leftovers:
        yield f"first      what a killed run has left is taken away: device {name}"
    for warning in plan.warnings:
        yield f"warning    {warning}"
    yield "The job would start. Nothing was started, and nothing is left behind."


def _donor(its: DevicePlan, donor: DonorAnswer) -> str:
    name = f"{donor.address} ({donor.name})" if donor.name else donor.address
    if donor.problem:
        return f"{name}: {donor.problem}"
    held = format_size_short(donor.slabs * its.slab_bytes)
    by = f" by {donor.transport}" if donor.transport else ""
    what = "of the device" if its.joined else "it can lend"
    return f"{name}: {counted(donor.slabs, 'slab')} {what} ({held}){by}"


def _cost(its: Cost, device_plan: DevicePlan) -> str:
    ring = ""
    if device_plan.far_bytes:
        each = format_size_short(cost.RING_BYTES)
        ring = f" ({each} of it for one process with far memory, as much more for each further one)"
    disk = f", {format_size_short(its.disk_bytes)} of disk" if its.disk_bytes else ""
    return (
        f"beside --local about {format_size_short(its.memory_bytes)} of this host's memory{ring}"
        f"{disk}, "
        f"and up to {format_size_short(its.donors_bytes)} of donors' memory"
    )


def _backup(its: DevicePlan) -> str:
    if its.backup is None:
        return "none: the pages of a lost donor are lost"
    if its.joined:
        return its.backup
    needs = f"{its.backup}: takes {format_size_short(its.backup_needs_bytes)}"
    if its.backup_free_bytes is None:
        return needs
    return f"{needs} of {format_size_short(its.backup_free_bytes)} that are free"
