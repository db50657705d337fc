# SPDX-License-Identifier: Apache-2.0
"""How busy each slab of a device is, and which ones deserve a donor.

The paper, section 4.2: `A = alpha·measured + (1 - alpha)·A_old` once per second with alpha = 0.2,
where measured counts the page-ins and page-outs of that second. A slab is hot above 20 page I/O
per second; only a hot slab is mapped (late binding).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infiniswap.config import PolicyConfig
from infiniswap.policy.ewma import blend


class ActivityTracker:
    """Activity of every slab of one device, in page I/O per second.

    Args:
        slab_count: slabs of the device.
        policy: [policy] of the configuration.
        now_s: time at which the totals are all zero.
    """

    def __init__(self, slab_count: int, policy: PolicyConfig, now_s: float) -> None:
        if slab_count < 0:
            raise ValueError(f"slab count {slab_count} is below zero")
        self._policy = policy
        self._activity = [0.0] * slab_count
        self._totals = [0] * slab_count
        self._ticked_s = now_s

    def tune(self, policy: PolicyConfig) -> None:
        """Uses other parameters from now on; the averages stay."""
        self._policy = policy

    def tick(self, now_s: float, totals: Sequence[int]) -> None:
        """Takes the counters once per period, late or not.

        A late tick spreads its pages over the time since the last one: if it comes three seconds
        late, 60 pages count as 20 per second for three periods, not as a burst of 60. The pages of
        a tick that comes before any time has passed count with the next one.

        Args:
            now_s: seconds of the clock used throughout.
            totals: page-ins plus page-outs of each slab since the device started. A total that
                went down (a restarted engine) starts a new count from zero.

        Raises:
            ValueError: `totals` is not one number per slab.
        """
        if len(totals) != len(self._totals):
            raise ValueError(f"{len(totals)} totals for {len(self._totals)} slabs")
        elapsed_s = now_s - self._ticked_s
        if elapsed_s <= 0.0:
            return
        self._ticked_s = now_s
        periods = elapsed_s / self._policy.period_s
        for slab, total in enumerate(totals):
            before = self._totals[slab]
            pages = total - before if total >= before else total
            self._totals[slab] = total
            if pages or self._activity[slab]:
                self._activity[slab] = blend(
                    self._activity[slab], pages / elapsed_s, self._policy.activity_alpha, periods
                )

    def activity(self, slab: int) -> float:
        """Page I/O per second of one slab."""
        return self._activity[slab]

    def is_hot(self, slab: int) -> bool:
        """Whether the slab's activity is above the threshold."""
        return self._activity[slab] > self._policy.hot_pages_per_s

    def hottest(self, unmapped: Iterable[int]) -> list[int]:
        """The hot ones of the given slabs, busiest first; ties by slab number."""
        hot = [slab for slab in unmapped if self.is_hot(slab)]
        return sorted(hot, key=lambda slab: (-self._activity[slab], slab))
