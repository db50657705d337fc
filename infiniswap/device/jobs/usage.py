# SPDX-License-Identifier: Apache-2.0
"""What a job uses: sampled while it runs, summed up and put into words when it has ended.

Swap belongs to the whole host, so some figures are bounds: the kernel does not tell which process
the pages in a swap area are of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.device.api import DeviceStatus
from infiniswap.device.jobs import compressed, heaps
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.compressed import ZswapUse
from infiniswap.device.jobs.job import JobResult
from infiniswap.documents import page
from infiniswap.errors import InfiniswapError
from infiniswap.system import swap, zswap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC, SYS, parse_key_values, try_read_text
from infiniswap.system.memory import CgroupMemory
from infiniswap.system.swap import SwapArea
from infiniswap.units import MIB, PAGE_BYTES, counted, format_size_short

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

_FULL_SHARE: Final = 0.05
_FULL_BYTES_MIN: Final = 4 * MIB
"""So little free space counts as none: the kernel keeps some of it in reserve per processor."""


@dataclass(slots=True)
class Peaks:
    """Over all samples of a job so far, bytes.

    Attributes:
        anon: anonymous memory, in RAM and swapped out together.
        local: all that counts against the limit, as the kernel tells it.
        swap: swapped out.
        others: at most this much of it in swap areas other than ours.
        swap_free_min: least free space in all swap areas, None before the first sample.
        oom_kills: processes that the kernel killed for the limit.
        swap_failures: pages for which there was no swap space; version 2 only.
        kept_by: the file that kept pages from going to any swap area when processes were killed,
            None without one; see infiniswap.system.zswap.
    """

    anon: int = 0
    local: int = 0
    swap: int = 0
    others: int = 0
    swap_free_min: int | None = None
    oom_kills: int = 0
    swap_failures: int = 0
    kept_by: Path | None = None


class Sampler:
    """Follows a job's cgroup and the swap areas.

    Args:
        cgroup: of the job.
        path: of our swap area.
        areas: every active one.
        sys: root of the sys file system.
        proc: root of the proc file system.
    """

    def __init__(
        self,
        cgroup: MemoryCgroup,
        path: str,
        areas: Callable[[], Iterable[SwapArea]] = swap.active_areas,
        sys: Path = SYS,
        proc: Path = PROC,
    ) -> None:
        self._cgroup = cgroup
        self._sys = sys
        self._path = os.path.realpath(path)
        self._areas = areas
        found = tuple(areas())
        self._others_before_bytes = self._others_used_bytes(found)
        self._swap_free_before_bytes = _free_bytes(found)
        self._compressed = compressed.Meter(cgroup)
        self.peaks = Peaks()
        self.heaps = heaps.MemoryOptions(proc)
        self.memory: CgroupMemory | None = None

    @property
    def zswap(self) -> ZswapUse | None:
        """What zswap has done so far."""
        return self._compressed.use()

    def sample(self) -> None:
        """Takes the figures of now into `peaks`; keeps the last ones where they cannot be read.

        Reading them does the job good, too: Linux balances a cgroup's lists of pages by sums that
        are up to four seconds old unless somebody reads them, and in a cgroup of a few tens of MiB
        its inactive list may be empty by then, which ends in a kill with swap left
        (mm/vmscan.c: inactive_is_low; seen with 6.18 and 16 MiB).
        """
        try:
            memory, areas = self._cgroup.memory(), tuple(self._areas())
        except InfiniswapError:
            return
        self.memory = memory
        self.heaps.look(self._cgroup.pids())
        peaks, swapped = self.peaks, memory.swap_bytes or 0
        peaks.anon = max(peaks.anon, memory.anon_bytes + swapped)
        peaks.local = max(peaks.local, memory.peak_bytes or memory.usage_bytes)
        peaks.swap = max(peaks.swap, swapped, self._swap_peak_bytes(memory))
        grown = max(0, self._others_used_bytes(areas) - self._others_before_bytes)
        peaks.others = max(peaks.others, min(grown, swapped))
        free = _free_bytes(areas)
        peaks.swap_free_min = (
            free if peaks.swap_free_min is None else min(free, peaks.swap_free_min)
        )
        peaks.oom_kills = max(peaks.oom_kills, memory.oom_kills or 0)
        peaks.swap_failures = self._swap_failures()
        self._compressed.sample()
        if peaks.oom_kills and peaks.kept_by is None:
            own = self._cgroup.path
            peaks.kept_by = zswap.keeps_pages_at((own, own.parent), sys=self._sys)

    def was_swap_full(self) -> bool:
        """Whether there was no swap space left at some time.

        Samples alone would miss it: a job fills the last of it within less time than lies between
        two, and its end frees it. The kernel's own high-water mark is exact.
        """
        before, peaks = self._swap_free_before_bytes, self.peaks
        margin = max(_FULL_BYTES_MIN, int(before * _FULL_SHARE))
        seen = peaks.swap_free_min is not None and peaks.swap_free_min <= margin
        return peaks.swap_failures > 0 or seen or before - peaks.swap <= margin

    def _others_used_bytes(self, areas: Iterable[SwapArea]) -> int:
        return sum(area.used_bytes for area in areas if area.path != self._path)

    def _swap_peak_bytes(self, memory: CgroupMemory) -> int:
        if self._cgroup.version == 2:
            return _number(try_read_text(self._cgroup.path / "memory.swap.peak"))
        both = _number(try_read_text(self._cgroup.path / "memory.memsw.max_usage_in_bytes"))
        return max(0, both - memory.limit_bytes) if memory.limit_bytes is not None else 0

    def _swap_failures(self) -> int:
        if self._cgroup.version != 2:
            return 0
        text = try_read_text(self._cgroup.path / "memory.swap.events") or ""
        return parse_key_values(text).get("fail", 0)


def _number(text: str | None) -> int:
    text = (text or "").strip()
    return int(text) if text.isdecimal() else 0


def _free_bytes(areas: Iterable[SwapArea]) -> int:
    return sum(area.size_bytes - area.used_bytes for area in areas)


# ------------------------------------------------------------------------- summary


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
            the local one, as pages were not allowed to go to any swap area.
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
        page_in_us_p50: time of a page-in at the front end, since the start of the device's process;
            also _p99.
        other_swap_bytes: at most this much went to other swap areas of the host.
        zswap: what it did meanwhile; None: nothing, or the kernel does not tell.
        device: the block device.
        shared: whether other runs or programs used the device, too.
        shared_areas: block devices of other runs; the command's pages went there as well.
        heap_by_limit: "node" or "java" if the command failed because that runtime sizes its heap by
            the limit; else "".
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
    page_in_bytes: int
    page_in_remote_bytes: int
    page_in_staging_bytes: int
    page_in_backup_bytes: int
    page_out_bytes: int
    remote_share: float | None
    page_in_us_p50: float
    page_in_us_p99: float
    other_swap_bytes: int
    zswap: ZswapUse | None
    device: str
    shared: bool
    page_in_backup_why: dict[str, int]
    donors_gone: dict[str, str]
    take_overs: int
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
) -> Summary:
    """Puts everything together; `after` is what the device told last, `areas` are other runs'."""

    def grown(key: str) -> int:
        return account.counts.get(key, 0) * PAGE_BYTES

    peaks = sampler.peaks
    remote, staging = grown("pages_in_remote"), grown("pages_in_staging")
    backup = grown("pages_in_backup")
    served = remote + staging + backup
    limit = ""
    if peaks.oom_kills:
        limit = "zswap" if peaks.kept_by else "local"
        limit = "device" if sampler.was_swap_full() else limit
    return Summary(
        command=command,
        exit_code=result.exit_code,
        elapsed_s=round(result.elapsed_s, 3),
        local_bytes=local_bytes,
        local_peak_bytes=peaks.local,
        anon_peak_bytes=peaks.anon,
        swap_peak_bytes=peaks.swap,
        oom_kills=peaks.oom_kills,
        limit=limit,
        page_in_bytes=grown("pages_in"),
        page_in_remote_bytes=remote,
        page_in_staging_bytes=staging,
        page_in_backup_bytes=backup,
        page_out_bytes=grown("pages_out"),
        remote_share=remote / served if served else None,
        page_in_us_p50=after.page_in_us_p50,
        page_in_us_p99=after.page_in_us_p99,
        other_swap_bytes=peaks.others,
        zswap=sampler.zswap,
        device=after.path,
        shared=shared,
        page_in_backup_why={name: grown(f"fallback_{name}") for name in _WHY},
        donors_gone=dict(account.donors_gone),
        take_overs=account.take_overs,
        shared_areas=areas,
        heap_by_limit=sampler.heaps.full(peaks.anon, peaks.swap, local_bytes)
        if result.exit_code
        else "",
    )


def describe_oom(summary: Summary, size_bytes: int) -> str:
    """Which limit ran out, and what to do."""
    killed = f"the kernel killed {counted(summary.oom_kills, 'process')} of the job: "
    local = format_size_short(summary.local_bytes)
    if summary.limit == "device":
        return (
            f"{killed}it used up its {local} of local memory (--local) and the whole swap device "
            f"of {format_size_short(size_bytes)}. Give a larger --size."
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
                f"{share(s.page_in_staging_bytes)}, disk {share(s.page_in_backup_bytes)}); page-in "
                f"p50 {s.page_in_us_p50:.0f} µs, p99 {s.page_in_us_p99:.0f} µs"
            )
        lines.append(text + (" (of all that use the device)" if s.shared else ""))
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
        lines.append(
            f"up to {format_size_short(s.other_swap_bytes)} went to other swap areas of this host"
        )
    if s.shared_areas:
        lines.append(describe_others(s.shared_areas))
    return lines


def describe_others(areas: Iterable[str]) -> str:
    """That there are other runs, whose areas are these."""
    return (
        f"swap areas are shared with other runs ({', '.join(areas)}): the kernel has no private "
        "ones, so pages of each command lie in the areas of all"
    )


def describe_areas(areas: Iterable[SwapArea], path: str) -> list[str]:
    """A note for each swap area other than the one at `path`."""
    found = tuple(areas)
    own_path = os.path.realpath(path)
    own = next((area for area in found if area.path == own_path), None)
    lines = []
    for area in found:
        if area is own:
            continue
        if own is None or area.priority < own.priority:
            when = "is used when ours is full"
        elif area.priority == own.priority:
            when = "is used in turn with ours"
        else:
            when = "is used before ours"
        lines.append(
            f"note: swap is host-wide; {area.path} (priority {area.priority}, "
            f"{format_size_short(area.size_bytes - area.used_bytes)} free) {when}"
        )
    return lines


def describe_progress(
    memory: CgroupMemory, local_bytes: int, status: DeviceStatus
) -> tuple[str, ...]:
    """The facts of the live line, the most important one first."""
    share = () if status.remote_share is None else (f"{status.remote_share:.0%} from donors",)
    return (
        f"{format_size_short(memory.swap_bytes or 0)} paged out",
        *share,
        f"{format_size_short(memory.anon_bytes)} of {format_size_short(local_bytes)} local",
        f"page-in {format_size_short(status.stats['pages_in'] * PAGE_BYTES)}",
    )


def choose_size(choices: Mapping[str, int]) -> tuple[int, str]:
    """The least of several sizes and which one it is; whole MiB, 0 when there is not one.

    Args:
        choices: bytes by what sets them.
    """
    why = min(choices, key=lambda name: choices[name])
    return choices[why] // MIB * MIB, why
