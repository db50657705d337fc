# SPDX-License-Identifier: Apache-2.0
"""How fast pages may be copied in the background, judged by what that costs page-ins.

No fixed rate is right for every link, disk and donor, and nobody could set one by hand: only the
time of page-ins shows what copies cost. So copying and resting take turns, and the time of page-ins
in a turn of copying is compared with that in the turn of rest which follows. Copying gets slower
if it costs more than `COST_MAX` and that is no accident: the mean of the differences is beyond its
own standard error. Otherwise it gets faster.

While hardly any page-in waits, there is nothing to compare and nobody to harm, and copying goes as
fast as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, stdev

COST_MAX = 0.05
"""Page-ins may take so much longer while pages are copied."""

TURN_S = 0.05

_PAIRS = 16  # of turns between two judgements: the noise of a single one is larger than COST_MAX
_PAIRS_HARM = 4  # or fewer, where the harm is plain
_START_PAGES_PER_S = 4096.0
_PAGES_PER_S_MIN = 512.0  # it has to end some time
_PAGES_PER_S_MAX = 262_144.0  # 1 GiB/s
_FASTER = 1.25
_SLOWER = 0.7
_HARM = 0.5
_QUIET_SHARE = 0.02  # of the time, with a page-in waiting: even twice that is very little
_CLIP = 16.0  # of the median: longer delays come from a disk or a scheduler


@dataclass(frozen=True, slots=True)
class Waits:
    """Page-ins during a turn.

    Attributes:
        count: how many.
        total_s: time that they took, together.
    """

    count: int = 0
    total_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Mean time of one; 0 without any."""
        return self.total_s / self.count if self.count else 0.0


def waits(before: Sequence[int], after: Sequence[int], bounds_ns: Sequence[int]) -> Waits:
    """The page-ins between two readings of a histogram.

    Args:
        before: count by bucket, at the first reading.
        after: likewise, at the second.
        bounds_ns: the longest time that each bucket counts.
    """
    counts = [max(0, now - was) for was, now in zip(before, after, strict=True)]
    total = sum(counts)
    seen, median_ns = 0, 0
    for count, bound in zip(counts, bounds_ns, strict=True):
        seen += count
        if 2 * seen >= total:
            median_ns = bound
            break
    clip_ns = _CLIP * median_ns
    taken_ns = sum(n * min(bound, clip_ns) for n, bound in zip(counts, bounds_ns, strict=True) if n)
    return Waits(total, taken_ns / 1e9)


class Pace:
    """Turns of copying and resting. No I/O, no clock."""

    def __init__(self) -> None:
        self._busy = _START_PAGES_PER_S
        self._is_quiet = False
        self._is_resting = False
        self._copying = Waits()  # the last turn of that kind
        self._costs: list[float] = []  # of each pair, as a logarithm

    @property
    def pages_per_s(self) -> float:
        """The rate now; 0 in a turn of rest, infinite while no page-in waits."""
        if self._is_resting:
            return 0.0
        return float("inf") if self._is_quiet else self._busy

    def begin(self) -> None:
        """Copying begins after a pause: what was learned before may no longer be true."""
        self._busy = min(self._busy, _START_PAGES_PER_S)
        self._is_quiet = self._is_resting = False
        self._costs.clear()

    def turn(self, elapsed_s: float, seen: Waits) -> None:
        """A turn is over, and the next one begins.

        Args:
            elapsed_s: how long it was.
            seen: the page-ins that ended in it.
        """
        was_quiet, self._is_quiet = self._is_quiet, seen.total_s <= _QUIET_SHARE * elapsed_s
        if self._is_quiet or was_quiet:
            self._is_resting = False
            self._costs.clear()
        elif self._is_resting:
            self._is_resting = False
            self._costs.append(log(self._copying.mean_s / seen.mean_s))
            self._judge()
        else:
            self._is_resting = True
            self._copying = seen

    def _judge(self) -> None:
        if len(self._costs) < _PAIRS_HARM:
            return
        cost = fmean(self._costs)
        doubt = stdev(self._costs) / sqrt(len(self._costs))
        if cost > max(log(1.0 + _HARM), 2.0 * doubt):
            self._busy = max(_PAGES_PER_S_MIN, self._busy * 0.5)
        elif len(self._costs) < _PAIRS:
            return
        elif cost > max(log(1.0 + COST_MAX), doubt):
            self._busy = max(_PAGES_PER_S_MIN, self._busy * _SLOWER)
        else:
            self._busy = min(_PAGES_PER_S_MAX, self._busy * _FASTER)
        self._costs.clear()
