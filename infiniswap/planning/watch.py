# SPDX-License-Identifier: Apache-2.0
"""Follows the runs of a plan: the one without a limit, and those with one.

`cli.run` calls `look` about ten times a second while the job runs; True ends the job.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from infiniswap.device.jobs import heaps
from infiniswap.device.jobs.summary import Summary
from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.planning.misses import First, Look, first_of, misses
from infiniswap.planning.prediction import Probe, limit_of
from infiniswap.planning.trials import Trial
from infiniswap.system import touched
from infiniswap.system.block_trace import PageEvents
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC, read_text
from infiniswap.system.memory import cgroup_needs, parse_meminfo
from infiniswap.system.swap import active_areas
from infiniswap.units import PAGE_BYTES

LIMIT_BYTES_MIN: Final = 16 << 20

_SHARE: Final = 50
"""Percent of the peak: the limit of a probe."""
_LOSES_MAX: Final = 5.0
"""Times of the run without a limit that the one with half may lose before its limit is taken
away."""
_TRIAL_LOSES: Final = 2.0
"""Times of what a trial should lose that it may lose before that."""
_TRIAL_LOSES_MIN: Final = 0.2
"""Times of the run without a limit that a trial may lose in any case: runs differ."""
_LOSES_END: Final = 10.0
"""Times of the run without a limit after whose loss any other is ended: something else is slow.
A trial that may lose more than half of that is given twice what it may lose."""

_COLD_MAX: Final = 5.0
"""Paging lengthens a job's own processor time at most so many times."""

_ASKS_S: Final = 5.0
"""A job that waits for its user's input for so long, without a break, is ended."""


class JobWatch:
    """Of one run.

    Attributes:
        user_s: processor time in user mode so far.
        elapsed_s: time of the run, once it has ended.
        summary: of `run`, when the job has ended; None: the device had gone.
        cut: whether this watch has ended the job.
    """

    def __init__(self) -> None:
        self.user_s = self.elapsed_s = 0.0
        self.summary: Summary | None = None
        self.cut = False
        self._user = touched.UserTime()
        self._began_s = self._asks_since_s = 0.0

    @property
    def at_s(self) -> float:
        """Since the job's start."""
        return time.monotonic() - self._began_s

    def look(self, cgroup: MemoryCgroup) -> bool:
        """Takes the figures of now."""
        if not self._began_s:
            self._began_s = self._asks_since_s = time.monotonic()
        pids = cgroup.pids()
        self.user_s = self._user.add(pids)
        self._check_terminal(pids)
        return False

    def _check_terminal(self, pids: tuple[int, ...]) -> None:
        """Raises UsageError for a job that waits for its user."""
        now_s = time.monotonic()
        if not touched.reads_terminal(pids):
            self._asks_since_s = now_s
        elif now_s - self._asks_since_s >= _ASKS_S:
            raise UsageError(
                "the command waits for input from the terminal, and would wait in each run",
                mend="Give it its input in a file: infiniswap plan -- COMMAND <FILE.",
            )

    def ended(self, summary: Summary) -> None:
        """The job has ended."""
        self.summary = summary
        self.elapsed_s = summary.elapsed_s

    @property
    def problem(self) -> str:
        """Why the run tells nothing; "" where it does."""
        if self.summary is None:
            return "ended with its device"
        if self.cut:
            return f"was ended after {self.elapsed_s:.1f} s, many times the job's own time"
        code, heap = self.summary.exit_code, self.summary.heap_by_limit
        why = f" ({heaps.describe(heap)})" if heap else ""
        return f"ended with exit code {code}{why}" if code else ""


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a job was.

    Attributes:
        at_s: since its start.
        user_s: processor time in user mode so far.
    """

    at_s: float
    user_s: float


class WholeWatch(JobWatch):
    """Of a run without a limit.

    Attributes:
        progress: at each look.
        peak_bytes: the most memory that the job needed.
        held_bytes: the most that it held, with what it had given up and may take again.
        swap_peak_bytes: the most that was swapped out.
        options: that set how much memory its programs take.
    """

    def __init__(self) -> None:
        super().__init__()
        self.options = heaps.MemoryOptions()
        self.progress: list[Reached] = []
        self.peak_bytes = self.held_bytes = self.swap_peak_bytes = 0

    def look(self, cgroup: MemoryCgroup) -> bool:
        """Notes how far it is."""
        super().look(cgroup)
        self.options.look(cgroup.pids())
        self.progress.append(Reached(self.at_s, self.user_s))
        with contextlib.suppress(InfiniswapError):  # the job is ending
            self.peak_bytes = max(self.peak_bytes, cgroup_needs(cgroup.path, cgroup.version))
        return False

    def ended(self, summary: Summary) -> None:
        """The job has ended."""
        super().ended(summary)
        self.held_bytes = summary.anon_peak_bytes
        self.swap_peak_bytes = summary.swap_peak_bytes

    def repeated(self, other: WholeWatch) -> None:
        """Another run of the job: the time of the quicker one counts, and the most that any of
        them used."""
        if other.elapsed_s < self.elapsed_s:
            self.elapsed_s, self.user_s = other.elapsed_s, other.user_s
            self.progress = other.progress
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.held_bytes = max(self.held_bytes, other.held_bytes)
        self.swap_peak_bytes = max(self.swap_peak_bytes, other.swap_peak_bytes)

    def time_at(self, user_s: float) -> float:
        """When it had come that far."""
        place = bisect_left(self.progress, user_s, key=lambda each: each.user_s)
        before = self.progress[place - 1] if place else Reached(0.0, 0.0)
        if place == len(self.progress):
            return before.at_s
        now = self.progress[place]
        wide_s = now.user_s - before.user_s
        share = (user_s - before.user_s) / wide_s if wide_s else 1.0
        return before.at_s + (now.at_s - before.at_s) * share


class LimitedWatch(JobWatch):
    """Of a run with a limit. Once it has lost much time, there is no limit any longer, and the
    job goes to its end.

    Args:
        whole: the run without a limit, which has ended.
        limit_bytes: of this one.
        all_bytes: the limit of the run without one.
        loses_max: it may lose so many times the time of that.

    Attributes:
        limit_bytes: of the run.
        lifted: how far it was when the limit was taken away; None: it was not.
    """

    def __init__(
        self, whole: WholeWatch, limit_bytes: int, all_bytes: int, loses_max: float
    ) -> None:
        super().__init__()
        self._whole = whole
        self._whole_s = whole.elapsed_s
        self._all_bytes = all_bytes
        self._limit_now_bytes = self.limit_bytes = limit_bytes
        self._loses_max = loses_max
        self._loses_end = max(_LOSES_END, 2 * loses_max)
        self.lifted: Reached | None = None

    def look(self, cgroup: MemoryCgroup) -> bool:
        """Takes the limit away when it is time."""
        super().look(cgroup)
        work_s = self._work_s()
        lost_s = self.at_s - work_s
        with contextlib.suppress(InfiniswapError):  # the job is ending
            self._note(cgroup, work_s)
            if lost_s >= self._loses_max * self._whole_s and self.lifted is None:
                cgroup.set_limit(self._all_bytes)
                self._limit_now_bytes = self._all_bytes
                self.lifted = Reached(self.at_s, self.user_s)
        self.cut = lost_s >= self._loses_end * self._whole_s
        return self.cut

    def _work_s(self) -> float:
        """How much of the run without a limit it has done."""
        return self._whole.time_at(self.user_s)

    def _note(self, cgroup: MemoryCgroup, work_s: float) -> None:
        """For whoever wants to know more."""


class TrialWatch(LimitedWatch):
    """Of a run that shows what its limit costs.

    Args:
        whole, limit_bytes, all_bytes: as above.
        slowdown: that its limit should have.
    """

    def __init__(
        self, whole: WholeWatch, limit_bytes: int, all_bytes: int, slowdown: float
    ) -> None:
        loses_max = max(_TRIAL_LOSES_MIN, _TRIAL_LOSES * (slowdown - 1.0))
        super().__init__(whole, limit_bytes, all_bytes, loses_max)

    def _work_s(self) -> float:
        """All of it: a job that only waits for something else has lost nothing, and its processor
        time tells too little of that."""
        return self._whole_s

    def trial(self) -> Trial:
        """What was measured, of a run without a problem."""
        assert self.summary is not None
        page_ins = self.summary.page_in_bytes // PAGE_BYTES
        return Trial(self.limit_bytes, self.elapsed_s, page_ins, self.lifted is not None)


class ProbeWatch(LimitedWatch):
    """Of the run with half of the memory, which shows what comes back.

    Args:
        whole, all_bytes: as above.
        swap_path: of the swap area.
    """

    def __init__(self, whole: WholeWatch, swap_path: str, all_bytes: int) -> None:
        limit_bytes = max(limit_of(whole.peak_bytes, _SHARE), LIMIT_BYTES_MIN)
        super().__init__(whole, limit_bytes, all_bytes, _LOSES_MAX)
        self._swap_path = swap_path
        self._looks: list[Look] = []
        self._users: list[float] = []

    def _note(self, cgroup: MemoryCgroup, work_s: float) -> None:
        values = parse_meminfo(read_text(PROC / "meminfo", "cannot read the memory figures"))
        areas = active_areas()
        on_swap = sum(area.used_bytes for area in areas if area.path == self._swap_path)
        cached_bytes = min(on_swap, values.get("SwapCached", 0))
        self._looks.append(
            Look(
                time.monotonic_ns(),
                work_s,
                self._limit_now_bytes,
                cgroup_needs(cgroup.path, cgroup.version),
                cached_bytes,
                on_swap - cached_bytes,
            )
        )
        self._users.append(self.user_s)

    def probe(self, events: PageEvents | None) -> Probe:
        """What was measured, of a run without a problem.

        Args:
            events: of the device meanwhile; None: there was no trace.
        """
        found = self.summary
        assert found is not None
        if events is not None and events.lost:
            events = None
        lifted_s = None if self.lifted is None else self.lifted.user_s
        work = work_of(self._users, self.user_s, self._whole.user_s, lifted_s)
        looks = tuple(
            replace(look, work_s=self._whole.time_at(user_s))
            for look, user_s in zip(self._looks, work, strict=True)
        )
        pages = () if events is None else tuple(misses(events, looks))
        free = next((look for look in looks if look.limit_bytes == self._all_bytes), None)
        return Probe(
            found.elapsed_s,
            min(1.0, free.work_s / self._whole_s) if free else 1.0,
            self.limit_bytes,
            found.page_in_bytes // PAGE_BYTES,
            found.page_out_bytes // PAGE_BYTES,
            pages,
            looks,
            first_of(events, self._whole.peak_bytes) if events else First(),
            self.lifted is not None,
        )


def work_of(
    user_s: Sequence[float], end_s: float, whole_s: float, lifted_s: float | None
) -> list[float]:
    """Processor time that the run without a limit had taken when it had done as much.

    A job that pages takes more processor time for the same work, as its caches are cold. What the
    run with a limit took without one, at its end, is compared with the end of the other run. The
    rest is what it did with a limit. Two runs never take quite the same time, so that rest may come
    out as nothing where the limit was taken away early; it is at least what `_COLD_MAX` leaves.

    Args:
        user_s: processor time of the run with a limit, at each look.
        end_s: and at its end.
        whole_s: of the run without a limit, at its end.
        lifted_s: of the run with a limit when that was taken away; None: it was not.
    """
    limited_s = end_s if lifted_s is None else lifted_s
    evenly_s = limited_s * whole_s / end_s if end_s else 0.0
    done_s = max(evenly_s / _COLD_MAX, whole_s - (end_s - limited_s))
    share = done_s / limited_s if limited_s else 1.0
    return [now_s * share if now_s <= limited_s else done_s + now_s - limited_s for now_s in user_s]
