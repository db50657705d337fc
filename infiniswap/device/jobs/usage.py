# SPDX-License-Identifier: Apache-2.0
"""What a job uses, sampled while it runs; `summary` sums it up when it has ended.

Swap belongs to the whole host, so some figures are bounds: the kernel does not tell which process
the pages in a swap area are of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infiniswap.device.jobs import compressed, heaps
from infiniswap.device.jobs.account import Account
from infiniswap.device.jobs.compressed import ZswapUse
from infiniswap.errors import InfiniswapError
from infiniswap.system import swap, zswap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC, SYS, parse_key_values, try_read_text
from infiniswap.system.kernel_log import KernelLog
from infiniswap.system.memory import CgroupMemory
from infiniswap.system.swap import SwapArea
from infiniswap.units import MIB, PAGE_BYTES, format_size_short

_FULL_SHARE: Final = 0.05
_FULL_BYTES_MIN: Final = 4 * MIB
"""So little free space counts as none: the kernel keeps some of it in reserve per processor."""
_LEFT_SAMPLES_MAX: Final = 20
"""A kill within this many samples (2 s) after a swapoff is attributed to it."""
_SWAPOFF_S_MAX: Final = 0.5
_LIMIT_BYTES: Final = 4 * MIB
"""A job whose highest use stayed so far below its limit has never reached it."""


@dataclass(slots=True)
class Peaks:
    """Over all samples of a job so far, bytes.

    Attributes:
        anon: anonymous memory, in RAM, swapped out and far together.
        local: all that counts against the limit, as the kernel tells it.
        swap: swapped out.
        others: at most this much of it in swap areas other than ours; `others_by_path`: in each.
        swap_free_min: least free space in all swap areas, None before the first sample.
        oom_kills: processes that the kernel killed for want of memory.
        limit_ooms: how often the job's own limit was the reason; None where the kernel does not
            tell.
        taken_off: path of a swap area that somebody took out of use, or tried to, when the kernel
            killed; empty: there was none.
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
    others_by_path: dict[str, int] = field(default_factory=dict)
    limit_ooms: int | None = None
    taken_off: str = ""


class Sampler:
    """Follows a job's cgroup and the swap areas.

    Args:
        cgroup: of the job.
        path: of our swap area.
        areas: every active one.
        leaving: the one that a swapoff under way is emptying, or None.
        sys: root of the sys file system.
        proc: root of the proc file system.
    """

    def __init__(
        self,
        cgroup: MemoryCgroup,
        path: str,
        areas: Callable[[], Iterable[SwapArea]] = swap.active_areas,
        leaving: Callable[[], SwapArea | None] = swap.being_taken_off,
        sys: Path = SYS,
        proc: Path = PROC,
    ) -> None:
        self._cgroup = cgroup
        self._sys = sys
        self._path = os.path.realpath(path)
        self._areas = areas
        self._leaving = leaving
        found = tuple(areas())
        self._others_before = self._others_used(found)
        self._swap_free_before_bytes = _free_bytes(found)
        self._left, self._left_samples = "", 0
        self._compressed = compressed.Meter(cgroup)
        self.peaks = Peaks()
        self.heaps = heaps.MemoryOptions(proc)
        self.memory: CgroupMemory | None = None
        self.far_bytes = 0
        """Far memory of the job, which the device tells; its cgroup does not count it."""

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
            memory, areas, leaving = self._cgroup.memory(), tuple(self._areas()), self._leaving()
        except InfiniswapError:
            return
        self.memory = memory
        self.heaps.look(self._cgroup.pids())
        peaks, swapped = self.peaks, memory.swap_bytes or 0
        peaks.anon = max(peaks.anon, memory.anon_bytes + swapped + self.far_bytes)
        peaks.local = max(peaks.local, memory.peak_bytes or memory.usage_bytes)
        peaks.swap = max(peaks.swap, swapped, self._swap_peak_bytes(memory))
        peaks.others = max(peaks.others, self._sample_others(areas, swapped))
        self._sample_leaving(areas, leaving)
        free = _free_bytes(areas)
        peaks.swap_free_min = (
            free if peaks.swap_free_min is None else min(free, peaks.swap_free_min)
        )
        if (memory.oom_kills or 0) > peaks.oom_kills and self._left_samples <= _LEFT_SAMPLES_MAX:
            peaks.taken_off = self._left
        peaks.oom_kills = max(peaks.oom_kills, memory.oom_kills or 0)
        peaks.limit_ooms = memory.limit_ooms
        peaks.swap_failures = self._swap_failures()
        self._compressed.sample()
        if peaks.oom_kills and peaks.kept_by is None:
            own = self._cgroup.path
            peaks.kept_by = zswap.keeps_pages_at((own, own.parent), sys=self._sys)

    def look_for_swapoff(self, log: KernelLog) -> None:
        """Looks in the kernel's log for a swapoff that ran out of memory when the job was killed,
        where no other reason is known: one that fails lasts shorter than the time between two
        samples. It reports itself some time after the kill.

        Args:
            log: since the job's start.
        """
        peaks = self.peaks
        is_open = peaks.oom_kills and not peaks.taken_off and not self.was_swap_full()
        if is_open and log.says("swapoff invoked oom-killer", _SWAPOFF_S_MAX):
            peaks.taken_off = self._path

    def _sample_leaving(self, areas: Iterable[SwapArea], leaving: SwapArea | None) -> None:
        """Keeps which area is being emptied: any may hold pages of the job. Our own one is active
        until the job has ended, unless somebody else has taken it off."""
        if not any(area.path == self._path for area in areas):
            self._left, self._left_samples = self._path, 0
        elif leaving is not None:
            self._left, self._left_samples = leaving.path, 0
        else:
            self._left_samples += 1

    def _sample_others(self, areas: Iterable[SwapArea], swapped_bytes: int) -> int:
        """Returns an upper bound of the job's bytes in other swap areas."""
        peaks, total_bytes = self.peaks.others_by_path, 0
        for path, used_bytes in self._others_used(areas).items():
            grown_bytes = used_bytes - self._others_before.get(path, 0)
            total_bytes += grown_bytes
            if at_most := min(max(0, grown_bytes), swapped_bytes):
                peaks[path] = max(peaks.get(path, 0), at_most)
        return min(max(0, total_bytes), swapped_bytes)

    def was_limit_reached(self) -> bool:
        """Whether the job's own limit may be why the kernel has killed: else it was a limit above
        it, or the memory of the host."""
        limit_bytes = self.memory.limit_bytes if self.memory is not None else None
        if self.peaks.limit_ooms is not None:
            return self.peaks.limit_ooms > 0
        return limit_bytes is None or self.peaks.local >= limit_bytes - _LIMIT_BYTES

    def was_swap_full(self) -> bool:
        """Whether there was no swap space left at some time.

        Samples alone would miss it: a job fills the last of it within less time than lies between
        two, and its end frees it. The kernel's own high-water mark is exact.
        """
        before, peaks = self._swap_free_before_bytes, self.peaks
        margin = max(_FULL_BYTES_MIN, int(before * _FULL_SHARE))
        seen = peaks.swap_free_min is not None and peaks.swap_free_min <= margin
        return peaks.swap_failures > 0 or seen or before - peaks.swap <= margin

    def _others_used(self, areas: Iterable[SwapArea]) -> dict[str, int]:
        return {area.path: area.used_bytes for area in areas if area.path != self._path}

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


def describe_progress(memory: CgroupMemory, local_bytes: int, account: Account) -> tuple[str, ...]:
    """The facts of the live line, the most important one first."""
    remote_share = account.remote_share
    share = () if remote_share is None else (f"{remote_share:.0%} from donors",)
    return (
        f"{format_size_short((memory.swap_bytes or 0) + account.far_bytes)} paged out",
        *share,
        f"{format_size_short(memory.anon_bytes)} of {format_size_short(local_bytes)} local",
        f"page-in {format_size_short(account.counts['pages_in'] * PAGE_BYTES)}",
    )


def choose_size(choices: Mapping[str, int]) -> tuple[int, str]:
    """The least of several sizes and which one it is; whole MiB, 0 when there is not one.

    Args:
        choices: bytes by what sets them.
    """
    why = min(choices, key=lambda name: choices[name])
    return choices[why] // MIB * MIB, why
