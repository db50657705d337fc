# SPDX-License-Identifier: Apache-2.0
"""How many pages a job would page in at each memory limit, from one run without a limit.

The referenced bits of the job's pages are cleared, then read again and again until most of them are
set. That is one window. A page whose bit appears when r bytes are resident and f of them have been
used in the window was one of r - f idle bytes. Under a limit of L, r - L bytes are paged out. So
the page was missing with a chance of (r - L) / (r - f), and surely where f is above L. For uses at
random this is exact. For a scan it counts fewer misses than a strict LRU has, as Linux does
(docs/adr/0049-plan.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infiniswap.units import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a job without a limit.

    Attributes:
        window: its number; the bits are cleared at the start of each.
        at_s: since the job's start.
        user_s: processor time in user mode so far, which measures the job's progress.
        resident_bytes: of its processes.
        referenced_bytes: of these, used since the window's start.
        used_bytes: what its cgroup counts, without file cache that could be dropped.
    """

    window: int
    at_s: float
    user_s: float
    resident_bytes: int
    referenced_bytes: int
    used_bytes: int

    @property
    def idle_bytes(self) -> int:
        """Resident, and not used in this window."""
        return max(0, self.resident_bytes - self.referenced_bytes)


@dataclass(frozen=True, slots=True)
class Moved:
    """Pages moved.

    Attributes:
        ins: paged in.
        outs: first page-outs: what of the job's memory does not fit.
    """

    ins: float
    outs: float


def peak_bytes(samples: Iterable[Sample]) -> int:
    """The most memory that the job used."""
    return max((sample.used_bytes for sample in samples), default=0)


def time_at(samples: Iterable[Sample], user_s: float) -> float:
    """When the job without a limit had come that far."""
    user_before_s = at_before_s = 0.0
    for sample in samples:
        if sample.user_s >= user_s:
            wide_s = sample.user_s - user_before_s
            share = (user_s - user_before_s) / wide_s if wide_s else 1.0
            return at_before_s + (sample.at_s - at_before_s) * share
        user_before_s, at_before_s = sample.user_s, sample.at_s
    return at_before_s


def traffic(samples: Sequence[Sample], limit_bytes: int, user_s: float | None = None) -> Moved:
    """What the job would move under the limit, until it has come as far as `user_s` (None: to its
    end). Never rises with the limit."""
    ins = 0.0
    most_bytes = 0
    for before, now in pairwise(samples):
        if user_s is not None and now.user_s > user_s:
            break
        most_bytes = max(most_bytes, now.used_bytes)
        if now.window == before.window:
            # Idle memory also shrinks when it is freed, which costs nothing.
            freed_bytes = max(0, before.resident_bytes - now.resident_bytes)
            touched_bytes = before.idle_bytes - now.idle_bytes - freed_bytes
            if touched_bytes > 0:
                ins += touched_bytes * _missing_share(before, now, limit_bytes)
    return Moved(ins / PAGE_BYTES, max(0, most_bytes - limit_bytes) / PAGE_BYTES)


def _missing_share(before: Sample, now: Sample, limit_bytes: int) -> float:
    """Chance that a page used between two looks was paged out."""
    out_bytes = now.used_bytes - limit_bytes
    if out_bytes <= 0:
        return 0.0
    idle_bytes = (before.idle_bytes + now.idle_bytes) / 2
    return 1.0 if idle_bytes <= out_bytes else out_bytes / idle_bytes
