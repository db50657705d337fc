# SPDX-License-Identifier: Apache-2.0
"""A job's device: its slabs, how active they are, and what it knows of donors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infiniswap.config import PolicyConfig
from infiniswap.policy.activity import ActivityTracker
from infiniswap.policy.donor_backoff import DonorBackoff
from infiniswap.policy.donor_faults import DonorFaults
from infiniswap.policy.empty import REST_PAGES_PER_S, EmptySince
from infiniswap.policy.quota import Tenant
from infiniswap.policy.refill import Refill
from infiniswap.simulation.scenario import Jobs, Run
from infiniswap.units import GIB, PAGE_BYTES

if TYPE_CHECKING:
    from infiniswap.simulation.donor import DonorHost, Lent

_BURST_S = 0.1
"""So many seconds of its rate a refill may begin at once (infiniswap.policy.refill)."""


class Device:
    """The device of one job.

    Args:
        number: of the device.
        host: where the job runs.
        job: its kind.
        slab_bytes: size of a slab.
        policy: [policy] of the configuration.
        now_s: time of its start.
        disk_pages_per_s: how fast the backup is read.
        period_s: distance of looks.

    Attributes:
        tenant: whose share it counts against.
        at: by slab, where it is; None: it has no donor.
        donors: slabs by donor.
        leases: donors that have granted a lease.
        urgent: slabs that have lost their donor.
        used_bytes: what is on the device now, pages whose copy is on the host included.
        is_closed: the job has ended.
        work_s: what the job has to do, in seconds with all of its memory at hand; 0: no end of it.
        left_s: of that.
        attained_gib_s: memory of donors that it has had.
        waited_s: how long it has lacked slabs.
    """

    __slots__ = (
        *("number", "host", "tenant", "job", "at", "donors", "leases", "urgent", "backoff"),
        *("used_bytes", "is_closed", "start_s", "local_bytes", "_slab_bytes", "_tracker", "_once"),
        *("work_s", "left_s", "attained_gib_s", "waited_s"),
        *("faults", "_totals", "_rates", "_counted_s", "_refill", "_filled", "_empty"),
    )

    def __init__(
        self,
        number: int,
        host: int,
        job: Jobs,
        slab_bytes: int,
        policy: PolicyConfig,
        now_s: float,
        disk_pages_per_s: float,
        period_s: float,
    ) -> None:
        self.number = number
        self.host = host
        self.tenant: Tenant[int] = (host, job.tenant)
        self.job = job
        self.start_s = now_s
        self.used_bytes = self.local_bytes = 0
        self.is_closed = False
        self.work_s = self.left_s = self.attained_gib_s = self.waited_s = 0.0
        self._slab_bytes = slab_bytes
        self._once = 0.0
        count = math.ceil(self._beyond_bytes(job.working_set_bytes)[1] / slab_bytes)
        self.at: list[tuple[DonorHost, Lent] | None] = [None] * count
        self.donors: Counter[DonorHost] = Counter()
        self.leases: set[DonorHost] = set()
        self.urgent: set[int] = set()
        self.backoff: DonorBackoff[DonorHost] = DonorBackoff()
        self.faults: dict[DonorHost, DonorFaults] = {}
        self._tracker = ActivityTracker(count, policy, now_s)
        self._totals = [0.0] * count
        self._rates = [0.0] * count
        self._counted_s = now_s
        # One step in each period has to begin what the product begins in many small ones.
        self._refill = Refill(disk_pages_per_s * max(1.0, period_s / _BURST_S), now_s)
        self._filled = [0] * count
        self._empty = EmptySince()

    # ------------------------------------------------------------------------ the job

    def grow(self, now_s: float) -> None:
        """Uses as much memory as the job does at this time."""
        self._count(now_s)
        share = _curve(self.job.curve, now_s - self.start_s)
        used = int(self.job.working_set_bytes * share)
        once_bytes, self.used_bytes = self._beyond_bytes(used)
        self.local_bytes = used - once_bytes
        self._once = once_bytes / self.used_bytes if self.used_bytes else 0.0
        slabs = math.ceil(self.used_bytes / self._slab_bytes)
        weights = [(n + 1.0) ** -self.job.skew for n in range(slabs)]
        total = sum(weights)
        self._rates = [self.job.pages_per_s * weight / total for weight in weights]
        self._rates += [0.0] * (len(self.at) - slabs)

    def _beyond_bytes(self, used_bytes: int) -> tuple[int, int]:
        """What is not on the host, and what is on the device."""
        local_bytes = min(used_bytes, int(self.job.working_set_bytes * self.job.local))
        beyond_bytes = used_bytes - local_bytes
        kept_bytes = int(local_bytes * self.job.kept_copies) if beyond_bytes else 0
        return beyond_bytes, beyond_bytes + kept_bytes

    def go_on(self, period_s: float, run: Run) -> None:
        """The job works for a period, the slower the more of its page I/O the backup serves."""
        rate, served = self.rates()
        on_disk = 1.0 - served / rate if rate else 0.0
        slowdown = 1.0
        if rate:
            slowdown = run.slowdown_donors + (run.slowdown_disk - run.slowdown_donors) * on_disk
        self.left_s -= period_s / slowdown
        self.attained_gib_s += self.donors.total() * self._slab_bytes * period_s / GIB
        self.waited_s += period_s if self.unmapped_count() else 0.0

    def _count(self, now_s: float) -> None:
        elapsed_s = now_s - self._counted_s
        self._counted_s = now_s
        if elapsed_s > 0.0:
            self._totals = [
                t + r * elapsed_s for t, r in zip(self._totals, self._rates, strict=True)
            ]

    @property
    def changes(self) -> bool:
        """Whether its use changes with time."""
        return len(self.job.curve) > 1

    # --------------------------------------------------------------------------- slabs

    def look(self, now_s: float) -> None:
        """Takes the counters, as the mapper does in each tick."""
        self._count(now_s)
        self._tracker.tick(now_s, [int(total) for total in self._totals])

    def activity(self, slab: int) -> float:
        """Page I/O per second, as of the last look."""
        return self._tracker.activity(slab)

    def wanted(self) -> list[int]:
        """Slabs that need a donor, in the order in which they get one."""
        unmapped = [slab for slab, where in enumerate(self.at) if where is None]
        urgent = [slab for slab in unmapped if slab in self.urgent]
        hot = [slab for slab in self._tracker.hottest(unmapped) if slab not in self.urgent]
        return urgent + hot

    def empty(self, now_s: float) -> list[int]:
        """Slabs that hold nothing for long and go back."""
        return self._empty.due(
            now_s,
            (
                where is not None
                and not self.pages(slab)
                and self._tracker.activity(slab) < REST_PAGES_PER_S
                for slab, where in enumerate(self.at)
            ),
        )

    def pages(self, slab: int) -> int:
        """Pages of a slab that are in use."""
        used_bytes = min(self._slab_bytes, max(0, self.used_bytes - slab * self._slab_bytes))
        return used_bytes // PAGE_BYTES

    def mapped(self, slab: int, donor: DonorHost, lent: Lent, filled_pages: int = 0) -> None:
        """A slab has a donor; what the donor lacks is copied there from the backup."""
        self.at[slab] = (donor, lent)
        self.donors[donor] += 1
        self._filled[slab] = filled_pages
        self._refill.begin(slab)

    def unmapped(self, slab: int) -> tuple[DonorHost, Lent] | None:
        """It has none."""
        where = self.at[slab]
        if where is None:
            return None
        self.at[slab] = None
        self.donors[where[0]] -= 1
        if not self.donors[where[0]]:
            del self.donors[where[0]]
        self._refill.end(slab)
        self._filled[slab] = 0
        return where

    def fill(self, now_s: float) -> None:
        """Copies from the backup what donors lack."""
        if self._refill.due_s() <= now_s:
            self._refill.step(now_s, self.activity, self._copy, self._slab_bytes // PAGE_BYTES)

    def _copy(self, slab: int, page: int, count: int) -> tuple[int, int] | None:
        slab_pages, pages = self._slab_bytes // PAGE_BYTES, self.pages(slab)
        page = max(page, self._filled[slab])
        begun = max(0, min(count, pages - page))
        self._filled[slab] = max(self._filled[slab], page + begun)
        return begun, slab_pages if page + begun >= pages else page + begun

    @property
    def is_busy(self) -> bool:
        """Whether it has to be looked at in each period."""
        if self._refill or self.changes:
            return True
        return any(
            where is None and (rate > 0.0 or slab in self.urgent)
            for slab, (where, rate) in enumerate(zip(self.at, self._rates, strict=True))
        )

    def remote_by_donor(self) -> Iterator[tuple[DonorHost, int]]:
        """Bytes of pages that donors hold and the host does not, slab by slab."""
        for slab, (where, filled) in enumerate(zip(self.at, self._filled, strict=True)):
            if where is not None:
                pages = min(filled, self.pages(slab))
                yield where[0], int(pages * PAGE_BYTES * self._once)

    def unmapped_count(self) -> int:
        """Slabs in use that have no donor."""
        rates = zip(self.at, self._rates, strict=True)
        return sum(where is None and rate > 0.0 for where, rate in rates)

    def rates(self) -> tuple[float, float]:
        """Page I/O per second, and the part of it that donors serve."""
        served = 0.0
        for slab, (where, rate) in enumerate(zip(self.at, self._rates, strict=True)):
            if where is not None and where[0].is_alive and rate:
                served += rate * min(1.0, self._filled[slab] / max(1, self.pages(slab)))
        return sum(self._rates), served


def _curve(points: Sequence[tuple[float, float]], time_s: float) -> float:
    """Straight lines between points, constant beyond both ends."""
    before = points[0]
    if time_s <= before[0]:
        return before[1]
    for point in points[1:]:
        if time_s < point[0]:
            part = (time_s - before[0]) / (point[0] - before[0])
            return before[1] + (point[1] - before[1]) * part
        before = point
    return before[1]
