# SPDX-License-Identifier: Apache-2.0
"""The summary of a job that has ended: its figures, and in words what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from infiniswap.device.api import DeviceStatus
from infiniswap.device.jobs import compressed, heaps
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.compressed import ZswapUse
from infiniswap.device.jobs.cost import Cost
from infiniswap.device.jobs.job import KILLED, JobResult
from infiniswap.device.jobs.other_areas import OtherArea
from infiniswap.device.jobs.usage import Peaks, Sampler
from infiniswap.documents import page
from infiniswap.units import PAGE_BYTES, counted, format_size_short

_WHY: Final = {
    "unmapped": "the slab had no donor",
    "suspended": "its donor was unreachable",
    "invalid": "the page was not on its donor yet",
    "error": "its donor failed",
    "slow": "its donor was slow",
    "quicker": "the disk was quicker than its donor",
    "measured": "the disk's speed was measured",
}
"""Why a page came from the backup, by the engine's counters `fallback_*`."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What `run` tells at the end; also the fields of --summary-json.

    Attributes:
        command: the program.
        exit_code: the command's, or 128 + N for signal N.
        elapsed_s: wall time of the command.
        local_bytes: its limit.
        local_peak_bytes: highest use of local memory, file cache included.
        anon_peak_bytes: highest anonymous memory, in RAM and swapped out together.
        swap_peak_bytes: highest amount swapped out.
        oom_kills: processes of the job that the kernel killed for want of memory.
        limit: which limit ran out then: "device", "local", or "" when nothing was killed; "zswap":
            the local one, as pages were not allowed to go to any swap area; "swapoff": the same, as
            somebody took the swap area out of use; "alarm": the same, as the device took no pages
            (see `alarms`); "host": a limit above the job's, or the memory of the host.
        taken_off: path of the swap area that was taken out of use then, or "".
        killed_by: "kernel", for want of memory; "other": a process sent SIGKILL; "": not killed.
        page_in_bytes: read from the device, and `page_in_*_bytes` by who served it. They are the
            device's, so with several runs on one device those of all.
        page_in_backup_why: of page_in_backup_bytes, why not from a donor: "unmapped" (the slab had
            none), "suspended" (unreachable), "invalid" (not there yet), "error", "slow";
            "quicker" and "measured": the disk was chosen (docs/adr/0036-quicker-source.md).
        donors_gone: why, by address, of donors that were gone for some time.
        take_overs: how often another process of the device took over. What a process has counted
            in the last second or so of its life is not in the figures.
        page_out_bytes: written to the device.
        remote_share: of what was paged in and not zeros, what donors served; None: no such.
        page_in_us_p50: time of a page-in that waited for a donor or the disk, at the front end,
            since the start of the device's process; also _p99.
        page_ins_waited: how many requests waited so; `page_ins_ready`: how many did not, as their
            pages were read ahead, in staging, or zeros.
        other_swap_bytes: at most this much went to other swap areas of the host.
        other_areas: these, see OtherArea.
        zswap: what it did meanwhile; None: nothing, or the kernel does not tell.
        device: the block device.
        shared: whether other runs or programs used the device, too.
        shared_areas: block devices of other runs; the command's pages went there as well.
        alarms: what the device has reported as wrong meanwhile.
        heap_by_limit: "node" or "java" if the command failed because that runtime sizes its heap by
            the limit; else "".
        cost: what the device takes of the host and of donors; None: it is not the run's own, or
            the kernel does not tell.
    """

    command: str
    exit_code: int
    elapsed_s: float
    local_bytes: int
    local_peak_bytes: int
    anon_peak_bytes: int
    swap_peak_bytes: int
    oom_kills: int
    limit: str
    taken_off: str
    killed_by: str
    page_in_bytes: int
    page_in_remote_bytes: int
    page_in_staging_bytes: int
    page_in_backup_bytes: int
    page_out_bytes: int
    remote_share: float | None
    page_in_us_p50: float
    page_in_us_p99: float
    page_ins_waited: int
    page_ins_ready: int
    other_swap_bytes: int
    other_areas: tuple[OtherArea, ...]
    zswap: ZswapUse | None
    device: str
    shared: bool
    page_in_backup_why: dict[str, int]
    donors_gone: dict[str, str]
    take_overs: int
    alarms: tuple[str, ...]
    cost: Cost | None
    shared_areas: tuple[str, ...] = ()
    heap_by_limit: str = ""


def summarize(
    command: str,
    result: JobResult,
    sampler: Sampler,
    local_bytes: int,
    account: Account,
    after: DeviceStatus,
    areas: tuple[str, ...] = (),
    *,
    shared: bool,
    sealed: Mapping[str, bool] | None = None,
    cost: Cost | None = None,
) -> Summary:
    """Puts everything together.

    Args:
        command, result, sampler, local_bytes, account: of the job.
        after: what the device told last.
        areas: block devices of other runs.
        shared: see Summary.
        sealed: whether other swap areas keep their pages sealed, by path.
        cost: see Summary.
    """

    def grown(key: str) -> int:
        return account.counts.get(key, 0) * PAGE_BYTES

    peaks = sampler.peaks
    remote, staging = grown("pages_in_remote"), grown("pages_in_staging")
    backup = grown("pages_in_backup")
    served = remote + staging + backup
    waited = account.counts.get("read_requests_waited", 0)
    return Summary(
        command=command,
        exit_code=result.exit_code,
        elapsed_s=round(result.elapsed_s, 3),
        local_bytes=local_bytes,
        local_peak_bytes=peaks.local,
        anon_peak_bytes=peaks.anon,
        swap_peak_bytes=peaks.swap,
        oom_kills=peaks.oom_kills,
        limit=_limit(sampler, account) if peaks.oom_kills else "",
        taken_off=peaks.taken_off,
        killed_by=_killer(result, peaks.oom_kills),
        page_in_bytes=grown("pages_in"),
        page_in_remote_bytes=remote,
        page_in_staging_bytes=staging,
        page_in_backup_bytes=backup,
        page_out_bytes=grown("pages_out"),
        remote_share=remote / served if served else None,
        page_in_us_p50=after.page_in_us_p50,
        page_in_us_p99=after.page_in_us_p99,
        page_ins_waited=waited,
        page_ins_ready=max(0, account.counts.get("read_requests", 0) - waited),
        other_swap_bytes=peaks.others,
        other_areas=_other_areas(peaks, sealed or {}),
        zswap=sampler.zswap,
        device=after.path,
        shared=shared,
        page_in_backup_why={name: grown(f"fallback_{name}") for name in _WHY},
        donors_gone=dict(account.donors_gone),
        take_overs=account.take_overs,
        alarms=tuple(account.alarms),
        cost=cost,
        shared_areas=areas,
        heap_by_limit=sampler.heaps.full(peaks.anon, peaks.swap, local_bytes)
        if result.exit_code
        else "",
    )


def _other_areas(peaks: Peaks, sealed: Mapping[str, bool]) -> tuple[OtherArea, ...]:
    found = sorted(peaks.others_by_path.items())
    return tuple(OtherArea(path, bytes_max, sealed.get(path)) for path, bytes_max in found)


def _limit(sampler: Sampler, account: Account) -> str:
    """Why the kernel killed; see Summary. The first reason that is known counts: an area that is
    taken off looks full, and a job killed for the host's memory has room below its own limit."""
    if sampler.peaks.taken_off:
        return "swapoff"
    if not sampler.was_limit_reached():
        return "host"
    if sampler.was_swap_full():
        return "device"
    if account.alarms:
        return "alarm"
    return "zswap" if sampler.peaks.kept_by else "local"


def _killer(result: JobResult, oom_kills: int) -> str:
    if result.exit_code != KILLED or result.is_explained:
        return ""
    return "kernel" if oom_kills else "other"


def describe_oom(summary: Summary, size_bytes: int) -> str:
    """Which limit ran out, and what to do."""
    killed = f"the kernel killed {counted(summary.oom_kills, 'process')} of the job: "
    local = format_size_short(summary.local_bytes)
    alarms = f" The device reported: {'; '.join(summary.alarms)}." if summary.alarms else ""
    if summary.limit == "swapoff":
        return (
            f"{killed}somebody else took the swap area {summary.taken_off} out of use (swapoff), "
            f"and its local memory of {local} (--local) could not hold what was there. Leave swap "
            "areas in use until the command has ended."
        )
    if summary.limit == "host":
        return (
            f"{killed}the memory of this host, or of a cgroup above the job's, ran out, not its "
            f"local memory of {local} (--local). `dmesg` names the limit."
        )
    if summary.limit == "device":
        return (
            f"{killed}it used up its {local} of local memory (--local) and the whole swap device "
            f"of {format_size_short(size_bytes)}. Give a larger --size.{alarms}"
        )
    if summary.limit == "alarm":
        return (
            f"{killed}its local memory of {local} (--local) ran out, and the swap device did not "
            f"take what had to be paged out.{alarms} `infiniswap doctor` says how to mend it."
        )
    if summary.limit == "zswap":
        return (
            f"{killed}its local memory of {local} (--local) ran out, and memory.zswap.writeback of "
            "its cgroup, or of the one above, is 0: what zswap did not take could not be paged "
            "out. Write 1 there, or switch zswap off."
        )
    return (
        f"{killed}its local memory of {local} (--local) ran out, and what it held could not be "
        "paged out (locked, or kernel memory) though the swap device had room. Give a larger "
        "--local."
    )


def describe(summary: Summary) -> list[str]:
    """The closing lines."""
    s = summary
    served = s.page_in_remote_bytes + s.page_in_staging_bytes + s.page_in_backup_bytes

    def share(part: int) -> str:
        return f"{part / served:.1%}" if served else "-"

    lines = [
        f"{s.command}: exit code {s.exit_code} after {s.elapsed_s:.1f} s, peak memory "
        f"{format_size_short(s.anon_peak_bytes)} with {format_size_short(s.local_bytes)} local, "
        f"{format_size_short(s.swap_peak_bytes)} paged out at the most"
    ]
    if s.page_in_bytes or s.page_out_bytes:
        text = (
            f"paged out {format_size_short(s.page_out_bytes)}, in "
            f"{format_size_short(s.page_in_bytes)}"
        )
        if served:
            text += (
                f" (donors {share(s.page_in_remote_bytes)}, staging "
                f"{share(s.page_in_staging_bytes)}, disk {share(s.page_in_backup_bytes)})"
            )
        lines.append(text + (" (of all that use the device)" if s.shared else ""))
        if waits := _describe_waits(s):
            lines.append(waits)
    elif s.swap_peak_bytes:
        lines.append("none of that went to the device")
    else:
        lines.append("nothing was paged out")
    if s.heap_by_limit:
        lines.append(heaps.describe(s.heap_by_limit))
    if s.zswap is not None:
        lines.append(compressed.describe(s.zswap))
    if s.page_in_bytes > s.anon_peak_bytes and not s.shared:
        lines.append(
            "all of its memory was paged in more than once: what helps such jobs more is shown in "
            f"{page('when-to-use.md')}"
        )
    if s.killed_by == "other":
        lines.append(
            "SIGKILL ended the command. Another process sent it (a person, earlyoom, systemd-oomd, "
            "a batch system): the kernel killed nothing for want of memory"
        )
    if s.alarms:
        lines.append(f"the device reported: {'; '.join(s.alarms)}")
    if reasons := [
        f"{format_size_short(part)} because {_WHY[name]}"
        for name, part in s.page_in_backup_why.items()
        if part
    ]:
        lines.append("from the disk: " + ", ".join(reasons))
    if s.donors_gone:
        gone = "; ".join(f"{address} ({why})" for address, why in s.donors_gone.items())
        lines.append(f"donors gone meanwhile: {gone}")
    if s.take_overs:
        lines.append(
            f"another process of the device took over {counted(s.take_overs, 'time')}; up to a "
            "second of paging before each is not counted"
        )
    if s.other_swap_bytes:
        lines.append(_describe_other_areas(s))
    if s.shared_areas:
        lines.append(describe_others(s.shared_areas))
    if s.cost is not None:
        lines += _describe_cost(s, s.cost)
    return lines


def _describe_waits(s: Summary) -> str:
    if not s.page_ins_waited:
        return ""
    ready = f"; {s.page_ins_ready} more had their pages at once" if s.page_ins_ready else ""
    return (
        f"{counted(s.page_ins_waited, 'page-in')} waited for a donor or the disk: p50 "
        f"{s.page_in_us_p50:.0f} µs, p99 {s.page_in_us_p99:.0f} µs{ready}"
    )


def _describe_other_areas(s: Summary) -> str:
    how = {True: ", sealed", False: ", not sealed", None: ""}
    named = ", ".join(
        f"{area.path} ({format_size_short(area.bytes_max)}{how[area.sealed]})"
        for area in s.other_areas
    )
    total = format_size_short(s.other_swap_bytes)
    return f"up to {total} went to other swap areas of this host: {named}"


def _describe_cost(s: Summary, cost: Cost) -> list[str]:
    disk = f", {format_size_short(cost.disk_bytes)} of disk" if cost.disk_bytes else ""
    lines = [
        f"beside --local, paging took {format_size_short(cost.memory_bytes)} of this host's memory"
        f"{disk} and {format_size_short(cost.donors_bytes)} of donors' memory"
    ]
    if cost.memory_bytes >= s.swap_peak_bytes:
        lines.append(
            f"warning: that is more of this host's memory than the "
            f"{format_size_short(s.swap_peak_bytes)} that it saved: such a command is better off "
            f"without `infiniswap run`"
        )
    return lines


def describe_others(areas: Iterable[str]) -> str:
    """That there are other runs, whose areas are these."""
    return (
        f"swap areas are shared with other runs ({', '.join(areas)}): the kernel has no private "
        "ones, so pages of each command lie in the areas of all"
    )
