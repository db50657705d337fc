# SPDX-License-Identifier: Apache-2.0
"""The figures of a job that has ended; `closing` puts them into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from infiniswap.device.api import DeviceStatus
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.compressed import ZswapUse
from infiniswap.device.jobs.cost import Cost
from infiniswap.device.jobs.job import KILLED, JobResult
from infiniswap.device.jobs.other_areas import OtherArea
from infiniswap.device.jobs.usage import Peaks, Sampler
from infiniswap.units import PAGE_BYTES

WHY: Final = {
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
class FarUse:
    """Far memory of the job.

    Attributes:
        unfit: why the command's program had none; empty: nothing kept it from having some.
        problem: why the device did not serve it for some time; empty: it did.
        peak_bytes: the most that was away at once.
        out_bytes: sent; `in_bytes`: brought back.
        fetches: blocks that came back whole; `small_fetches`: parts of blocks.
        fetch_wait_s: how long threads waited for these, summed up.
        room_waits: how often a thread waited until others' pages had left; `room_wait_s`: how long.
        pauses: how often far memory stopped evicting, because a process touched pages at random,
            and the kernel swapped instead; `pause_s`: how long.
        handed_back_bytes: that became the kernel's for good, by reason (enum iswf_why in
            csrc/far/ring.h).
        never: processes that had no agent, by reason (enum iswf_off there).
        swap_bytes: the most that left by swap meanwhile: what never was far, what was handed back,
            what left during pauses, and what exceeds the device's far range.
        lost_pages: pages of 4 KiB whose bytes are lost: programs that touch one get SIGBUS.
    """

    unfit: str
    problem: str
    peak_bytes: int
    out_bytes: int
    in_bytes: int
    fetches: int
    small_fetches: int
    fetch_wait_s: float
    room_waits: int
    room_wait_s: float
    pauses: int
    pause_s: float
    handed_back_bytes: dict[str, int]
    never: dict[str, int]
    swap_bytes: int
    lost_pages: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What `run` tells at the end; also the fields of --summary-json.

    Attributes:
        command: the program.
        exit_code: the command's, or 128 + N for signal N.
        elapsed_s: wall time of the command.
        local_bytes: its limit.
        local_peak_bytes: highest use of local memory, file cache included.
        anon_peak_bytes: highest anonymous memory, in RAM, swapped out and far together.
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
        page_in_waited_s: sum of the times of those that waited, at most 1/16 off. Several threads
            may wait at once.
        page_outs_waited: how many requests waited for a free staging buffer.
        other_swap_bytes: at most this much went to other swap areas of the host.
        other_areas: these, see OtherArea.
        zswap: what it did meanwhile; None: nothing, or the kernel does not tell.
        device: the block device; `device_bytes`: its size.
        shared: whether other runs or programs used the device, too.
        shared_areas: block devices of other runs; the command's pages went there as well.
        alarms: what the device has reported as wrong meanwhile.
        heap_by_limit: "node" or "java" if the command failed because that runtime sizes its heap by
            the limit; else "".
        far: its far memory; None: --paging swap. Pages that went far are among those that the
            device has read and written.
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
    page_in_waited_s: float
    page_outs_waited: int
    other_swap_bytes: int
    other_areas: tuple[OtherArea, ...]
    zswap: ZswapUse | None
    device: str
    device_bytes: int
    shared: bool
    page_in_backup_why: dict[str, int]
    donors_gone: dict[str, str]
    take_overs: int
    alarms: tuple[str, ...]
    cost: Cost | None
    shared_areas: tuple[str, ...] = ()
    heap_by_limit: str = ""
    far: FarUse | None = None


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
    unfit: str = "",
) -> Summary:
    """Puts everything together.

    Args:
        command, result, sampler, local_bytes, account: of the job.
        after: what the device told last.
        areas: block devices of other runs.
        shared: see Summary.
        sealed: whether other swap areas keep their pages sealed, by path.
        cost: see Summary.
        unfit: see FarUse.
    """

    def grown(key: str) -> int:
        return account.counts.get(key, 0) * PAGE_BYTES

    peaks, counts = sampler.peaks, account.counts
    waited = counts.get("read_requests_waited", 0)
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
        page_in_remote_bytes=grown("pages_in_remote"),
        page_in_staging_bytes=grown("pages_in_staging"),
        page_in_backup_bytes=grown("pages_in_backup"),
        page_out_bytes=grown("pages_out"),
        remote_share=account.remote_share,
        page_in_us_p50=after.page_in_us_p50,
        page_in_us_p99=after.page_in_us_p99,
        page_ins_waited=waited,
        page_ins_ready=max(0, counts.get("read_requests", 0) - waited),
        page_in_waited_s=round(counts.get("read_requests_waited_us", 0) / 1e6, 3),
        page_outs_waited=counts.get("staging_waits", 0),
        other_swap_bytes=peaks.others,
        other_areas=_other_areas(peaks, sealed or {}),
        zswap=sampler.zswap,
        device=after.path,
        device_bytes=after.size_bytes,
        shared=shared,
        page_in_backup_why={name: grown(f"fallback_{name}") for name in WHY},
        donors_gone=dict(account.donors_gone),
        take_overs=account.take_overs,
        alarms=tuple(account.alarms),
        cost=cost,
        shared_areas=areas,
        heap_by_limit=_full_heap(result.exit_code, sampler, local_bytes),
        far=_far_use(account, peaks, unfit) if unfit or after.far is not None else None,
    )


def _full_heap(exit_code: int, sampler: Sampler, local_bytes: int) -> str:
    peaks = sampler.peaks
    if not exit_code:
        return ""
    return sampler.heaps.full(exit_code, peaks.anon, peaks.swap, local_bytes)


def _far_use(account: Account, peaks: Peaks, unfit: str) -> FarUse:
    counts = account.far_counts

    def by_reason(prefix: str, unit: int) -> dict[str, int]:
        found = ((name, number) for name, number in counts.items() if name.startswith(prefix))
        return {name.removeprefix(prefix): number * unit for name, number in found if number}

    return FarUse(
        unfit=unfit,
        problem=account.far_problem,
        peak_bytes=account.far_bytes_max,
        out_bytes=counts.get("pages_out", 0) * PAGE_BYTES,
        in_bytes=counts.get("pages_in", 0) * PAGE_BYTES,
        fetches=counts.get("fetches", 0),
        small_fetches=counts.get("small_fetches", 0),
        fetch_wait_s=round(counts.get("fetch_wait_ns", 0) / 1e9, 3),
        room_waits=counts.get("room_waits", 0),
        room_wait_s=round(counts.get("room_wait_ns", 0) / 1e9, 3),
        pauses=counts.get("pauses", 0),
        pause_s=round(counts.get("pause_ns", 0) / 1e9, 3),
        handed_back_bytes=by_reason("back_", PAGE_BYTES),
        never=by_reason("off_", 1),
        swap_bytes=peaks.swap,
        lost_pages=counts.get("pages_lost", 0),
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
