# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of runs that are counted slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 1.0
"""Over which a level is an average: a slice alone says little."""

RECOVERED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job.

    Attributes:
        slice_s: length of a slice, in seconds.
        ops: what was done in each.
        events: seconds since the start at which something was done to it.
    """

    slice_s: float
    ops: Sequence[int]
    events: Sequence[float] = ()

    @property
    def per_s(self) -> float:
        """Operations a second over the whole run."""
        return per_s(self)


def per_s(run: Run, begin_s: float = 0.0, end_s: float | None = None) -> float:
    """Operations a second in a part of the run; 0 for a part without slices."""
    end = len(run.ops) if end_s is None else round(end_s / run.slice_s)
    part = run.ops[round(begin_s / run.slice_s) : end]
    return sum(part) / (len(part) * run.slice_s) if part else 0.0


def moving(run: Run, window_s: float = WINDOW_S) -> list[float]:
    """Operations a second in the window that begins with each slice, as far as there are whole
    windows."""
    count = max(1, round(window_s / run.slice_s))
    total, found = sum(run.ops[:count]), []
    for first in range(len(run.ops) - count + 1):
        found.append(total / (count * run.slice_s))
        if first + count < len(run.ops):
            total += run.ops[first + count] - run.ops[first]
    return found


def lowest_per_s(run: Run, begin_s: float = 0.0) -> float:
    """The worst window of the run, from a moment on; 0 where no whole window is left."""
    return min(moving(run)[round(begin_s / run.slice_s) :], default=0.0)


def recovered_s(run: Run, fault_s: float, level_per_s: float) -> float:
    """Seconds from a fault until, after the worst window that followed, a whole window reaches
    RECOVERED_SHARE of a level; 0 where not even the worst was below it, all that is left of the
    run where none is back. (The worst may come late: a donor is waited for first.)"""
    windows = moving(run)[round(fault_s / run.slice_s) :]
    wanted_per_s = RECOVERED_SHARE * level_per_s
    if not windows:
        return left_s(run, fault_s)
    worst = windows.index(min(windows))
    if windows[worst] >= wanted_per_s:
        return 0.0
    for place in range(worst, len(windows)):
        if windows[place] >= wanted_per_s:
            return place * run.slice_s
    return left_s(run, fault_s)


def left_s(run: Run, fault_s: float) -> float:
    """What there is of the run after a moment, in seconds."""
    return max(0.0, len(run.ops) * run.slice_s - fault_s)


def work_lost_s(base: Run, fault: Run) -> float:
    """How long the job would have to go on without a fault to get done what it lacks. Unlike a
    share, that does not depend on the length of the run."""
    if not base.per_s:
        return 0.0
    return (sum(base.ops) - sum(fault.ops)) / base.per_s
