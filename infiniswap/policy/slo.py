# SPDX-License-Identifier: Apache-2.0
"""Protects a service of the donor's own host: lend, hold, or give slabs back.

The owner of the host names a latency of the service and its bound. While the latency is in danger
nothing more is lent. If it stays above the bound, slabs go back in steps of a quarter until it
holds. Afterwards the donor lends more in steps as well, each of which must prove harmless before
the next one. A step that breaks the bound is undone, and the next one waits twice as long, so a
service that bears a certain number of lent slabs ends near that number and stays there.

    lend ── in danger ──▶ hold ── above the bound for settle_s ──▶ give back a quarter ─┐
     ▲                     ▲                                                            │
     │                     └────────────────────────────────────────────────────────────┘
     └── calm for three settle_s or more: one step

Two figures decide, as in infiniswap.policy.headroom: the newest and the average. Holding costs
little, so one of them suffices. Giving back costs consumers, so it takes both (docs/adr/0051).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from infiniswap.policy.ewma import Ewma

HOLD_SHARE: Final = 0.9
"""The service is in danger when its average latency is above this share of the bound."""

_WEIGHT: Final = 0.2
_PERIODS: Final = 10
"""Of the average in a settle time: a tenth of it is then older than that."""

_CALM: Final = 3.0
_CALM_MAX: Final = 64.0
"""Settle times without danger before the next step, at least and at most."""

_BLIND: Final = 3.0
"""Settle times for which the last latency counts."""

UNLIMITED: Final = 1 << 31
"""More slabs than there are."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do now.

    Attributes:
        mapped_max: so many slabs may be lent in all.
        give_back: slabs to take back, the most active first.
    """

    mapped_max: int
    give_back: int = 0


class SloPolicy:
    """Follows a latency and says what to do with the lent slabs. No I/O, no clock.

    Args:
        bound: of the latency, in its unit; above zero.
        settle_s: how long a change of the lent slabs takes to show in the latency, seconds.

    Attributes:
        is_held: nothing more is lent, for the latency is or was in danger.
    """

    def __init__(self, bound: float, settle_s: float) -> None:
        if bound <= 0.0 or settle_s <= 0.0:
            raise ValueError("bound and settle time have to be above zero")
        self.bound = bound
        self.settle_s = settle_s
        self._average = self._new_average()
        self._newest = 0.0
        self._seen_s = float("-inf")
        self._danger_s: float | None = None
        self._calm_s = float("inf")
        self._limit = UNLIMITED
        self._held_at: int | None = None  # the limit before holding; None: nothing is held
        self.is_held = False
        self._unproven: int | None = None  # the limit before a step that is being tried
        self._changed_s = float("-inf")
        self._wait_s = _CALM * settle_s

    def _new_average(self) -> Ewma:
        return Ewma(_WEIGHT, self.settle_s / _PERIODS)

    def is_blind(self, now_s: float) -> bool:
        """Whether the last latency is too old to go by."""
        return now_s - self._seen_s > _BLIND * self.settle_s

    @property
    def latency(self) -> float:
        """The newest; 0 before the first."""
        return self._newest

    @property
    def is_over(self) -> bool:
        """Whether the latency is above its bound, and not only for a moment."""
        return min(self._newest, self._average.value or 0.0) > self.bound

    @property
    def in_danger(self) -> bool:
        """Whether the latency is above its bound, or close to it."""
        average = self._average.value or 0.0
        return self._newest > self.bound or average > HOLD_SHARE * self.bound

    def observe(self, now_s: float, latency: float) -> None:
        """Takes a latency that was measured at `now_s`."""
        if self.is_blind(now_s):
            self._average = self._new_average()
            self._calm_s = float("inf")
        self._newest, self._seen_s = latency, now_s
        self._average.update(now_s, latency)
        if self.in_danger:
            self._calm_s = float("inf")
            if self._danger_s is None:
                self._danger_s = now_s
        else:
            self._danger_s = None
            self._calm_s = min(self._calm_s, now_s)

    def advise(self, now_s: float, mapped: int, slabs_max: int) -> Advice:
        """What to do now. Without a recent latency nothing more is lent, and nothing is taken back.

        Args:
            now_s: seconds of the clock used throughout.
            mapped: slabs that are lent.
            slabs_max: of the whole pool.
        """
        if self.is_blind(now_s):
            return Advice(0)
        if not self.is_over and mapped > self._limit:
            self._limit = mapped  # it holds before all of them have come back
        if self.in_danger:
            self._protect(now_s, mapped)
        else:
            self._relax(now_s, slabs_max)
        give_back = max(0, mapped - self._limit)
        if give_back:
            self._changed_s = now_s  # the change is not complete yet
        return Advice(min(mapped, self._limit) if self.is_held else self._limit, give_back)

    def _protect(self, now_s: float, mapped: int) -> None:
        if not self.is_held:
            self.is_held, self._held_at = True, self._limit
        if mapped > self._limit:
            return
        self._limit = mapped
        begun_s = now_s if self._danger_s is None else self._danger_s
        if not self.is_over or now_s - max(begun_s, self._changed_s) < self.settle_s:
            return
        kept = mapped - max(1, mapped // 4)
        if self._unproven is not None:
            kept = min(self._unproven, mapped - 1)
            self._wait_s = min(2.0 * self._wait_s, _CALM_MAX * self.settle_s)
        self._limit = max(0, kept)
        self._held_at = self._unproven = None

    def _relax(self, now_s: float, slabs_max: int) -> None:
        calm_s = now_s - max(self._calm_s, self._changed_s)
        if self.is_held and self._held_at is not None:
            if calm_s >= _CALM * self.settle_s:  # nothing was taken back
                self._limit, self.is_held, self._held_at = self._held_at, False, None
                self._changed_s = now_s
            return
        if calm_s < self._wait_s:
            return
        if self._unproven is not None:
            self._unproven = None
            self._wait_s = max(_CALM * self.settle_s, self._wait_s / 2.0)
        self.is_held = False
        if self._limit < UNLIMITED:
            self._unproven, self._changed_s = self._limit, now_s
            self._limit += max(1, self._limit // 4)
            if self._limit >= slabs_max:
                self._limit = UNLIMITED
