# SPDX-License-Identifier: Apache-2.0
"""Which limits a plan tries, until one costs the wanted slowdown, and what is known then.

The curve of a plan counts pages. What else a limit costs, close to a job's peak above all, shows
only when the job runs with it (docs/adr/0049-plan.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from infiniswap.planning.prediction import Model, Point, Source, limit_of
from infiniswap.units import MIB

SHARES: Final = (100, 95, 90, 85, 80, 75, 70, 65, 60, 55, 50)
"""Limits of a table, percent of the job's peak."""

TRIALS_MAX: Final = 3
"""Runs that look for a limit."""

_CLOSE: Final = 0.05
"""A slowdown so far from the wanted one is as good: two runs without a limit differ by as much."""

_NARROW: Final = 0.005
"""Of the peak: memory that is not worth another run, nor another line of a table."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run with a limit.

    Attributes:
        elapsed_s: its time.
        page_ins: pages that came back.
        is_lifted: it lost so much that its limit was taken away before its end.
    """

    limit_bytes: int
    elapsed_s: float
    page_ins: int
    is_lifted: bool = False


class LimitSearch:
    """For the smallest limit with a slowdown.

    Args:
        model: what the runs before told.
        slowdown: that is wanted.
        lowest_bytes: no limit is below it.

    Attributes:
        model: the same, with the time of the quickest run.
        tried: so far.
    """

    def __init__(self, model: Model, slowdown: float, lowest_bytes: int) -> None:
        self.model = model
        self.tried: list[Trial] = []
        self._slowdown = slowdown
        self._close = min(_CLOSE, (slowdown - 1.0) / 2)
        self._lowest_bytes = lowest_bytes
        self._narrow_bytes = round(_NARROW * model.peak_bytes)

    def next_bytes(self) -> int | None:
        """The limit to try, in whole MiB; None: no other run is worth its time."""
        if len(self.tried) == TRIALS_MAX or any(map(self._is_near, self.tried)):
            return None
        limit_bytes = self._between() if self.tried else self._foreseen()
        is_less = limit_bytes <= self._enough().limit_bytes - self._narrow_bytes
        return limit_bytes if is_less else None

    def note(self, trial: Trial) -> None:
        """What came of it. No limit makes a job quicker: where it was, the runs without one were
        slow for another reason."""
        self.tried.append(trial)
        elapsed_s = min(self.model.elapsed_s, trial.elapsed_s)
        self.model = replace(self.model, elapsed_s=elapsed_s)

    def recommended(self) -> Point:
        """The smallest limit that was tried and is quick enough; all that the job holds where
        there is none."""
        best = self._enough()
        if best not in self.tried:
            return self.model.at(best.limit_bytes)
        return _point(self.model, best)

    def _slowdown_of(self, trial: Trial) -> float:
        return trial.elapsed_s / self.model.elapsed_s

    def _is_enough(self, trial: Trial) -> bool:
        is_quick = self._slowdown_of(trial) <= self._slowdown + self._close
        return is_quick and not trial.is_lifted

    def _is_near(self, trial: Trial) -> bool:
        """Whether less memory would be too slow, or cannot be had."""
        is_least = trial.limit_bytes <= self._lowest_bytes
        is_slow = self._slowdown_of(trial) >= self._slowdown - self._close
        return self._is_enough(trial) and (is_least or is_slow)

    def _foreseen(self) -> int:
        """What the curve says."""
        return max(self.model.smallest(self._slowdown).limit_bytes, self._lowest_bytes)

    def _between(self) -> int:
        """On the line between the limits that are closest to what is wanted, below and above."""
        above = self._enough()
        below = self._too_slow(above.limit_bytes)
        most, least = self._slowdown_of(below), self._slowdown_of(above)
        share = min(1.0, max(0.0, (most - self._slowdown) / max(most - least, 1e-9)))
        wide = above.limit_bytes - below.limit_bytes
        limit_bytes = below.limit_bytes + max(self._narrow_bytes, round(share * wide))
        return -(-limit_bytes // MIB) * MIB

    def _enough(self) -> Trial:
        """The smallest limit that is known to be quick enough."""
        held_bytes = max(self._lowest_bytes, -(-self.model.held_bytes // MIB) * MIB)
        return min(
            filter(self._is_enough, self.tried),
            key=lambda trial: trial.limit_bytes,
            default=Trial(held_bytes, self.model.elapsed_s, 0),
        )

    def _too_slow(self, above_bytes: int) -> Trial:
        """The largest limit below that one that is known not to be."""
        lowest = self.model.at(self._lowest_bytes)
        return max(
            (
                trial
                for trial in self.tried
                if trial.limit_bytes < above_bytes and not self._is_enough(trial)
            ),
            key=lambda trial: trial.limit_bytes,
            default=Trial(lowest.limit_bytes, lowest.elapsed_s, lowest.page_ins),
        )


def curve(model: Model, ran: Sequence[Trial]) -> tuple[Point, ...]:
    """What is known of each limit: without one, of those that ran, and of those between.

    A limit that ran costs what it cost then, whatever was foreseen. Limits above it cost no more,
    and limits below it no less. Nothing is said of limits below the lowest one that ran.

    Args:
        model: what the run with half of the memory told.
        ran: that run and those that tried a limit.
    """
    whole = model.ran(model.peak_bytes, model.elapsed_s, 0, "measured")
    known = [whole, *(_point(model, trial) for trial in ran)]
    lowest_bytes = min(point.limit_bytes for point in known)
    apart_bytes = _NARROW * model.peak_bytes
    between = [
        _between(model, limit_bytes, known)
        for limit_bytes in (limit_of(model.peak_bytes, share) for share in SHARES)
        if limit_bytes > lowest_bytes
        and all(abs(limit_bytes - point.limit_bytes) > apart_bytes for point in known)
    ]
    rest = sorted((*known[1:], *between), key=lambda point: -point.limit_bytes)
    return (whole, *rest)


def _point(model: Model, trial: Trial) -> Point:
    source: Source = "at least" if trial.is_lifted else "measured"
    return model.ran(trial.limit_bytes, trial.elapsed_s, trial.page_ins, source)


def _between(model: Model, limit_bytes: int, known: Sequence[Point]) -> Point:
    """What was foreseen of a limit, as far as no run contradicts it."""
    foreseen = model.known(limit_bytes)
    elapsed_s, page_ins, source = foreseen.elapsed_s, foreseen.page_ins, foreseen.source
    for ran in known:
        if ran.limit_bytes > limit_bytes and ran.elapsed_s > elapsed_s:
            elapsed_s, page_ins = ran.elapsed_s, max(page_ins, ran.page_ins)
            source = "at least" if ran.source == "at least" else source
    for ran in known:  # comes last: what disturbed a run with more memory is no cost of the limit
        if ran.limit_bytes < limit_bytes and ran.source == "measured":
            if ran.elapsed_s < elapsed_s:
                elapsed_s, source = ran.elapsed_s, "estimated"
            page_ins = min(page_ins, ran.page_ins)
    return model.ran(limit_bytes, elapsed_s, page_ins, source)
