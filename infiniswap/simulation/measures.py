# SPDX-License-Identifier: Apache-2.0
"""What a simulation reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

KINDS: Final = ("own", "pages", "slabs", "held")
"""Ways to count a host's use: its own alone; and the pages that it keeps for others; or whole slabs
that it has lent; or these and the free slabs of its pool."""


class Spread(Struct, frozen=True):
    """The use of all hosts, as shares of their memory. A ratio without a meaning (the divisor is
    zero) is None."""

    mean: float
    median: float
    p99: float
    max: float
    min: float
    max_median: float | None
    max_min: float | None
    p99_median: float | None


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value. The median and p99 lie on straight lines between values."""
    ranked = sorted(values)
    median, p99 = quantile(ranked, 0.5), quantile(ranked, 0.99)
    return Spread(
        mean=math.fsum(ranked) / len(ranked),
        median=median,
        p99=p99,
        max=ranked[-1],
        min=ranked[0],
        max_median=_ratio(ranked[-1], median),
        max_min=_ratio(ranked[-1], ranked[0]),
        p99_median=_ratio(p99, median),
    )


def quantile(ranked: Sequence[float], share: float) -> float:
    """Of sorted values."""
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


class Row(Struct, frozen=True):
    """The time line.

    Attributes:
        evictions: since the start.
        messages: since the start.
        served: part of the page I/O that donors serve; 1 where there is none.
    """

    time_s: float
    own: Spread
    slabs: Spread
    held: Spread
    pages_mean: float
    mapped: int
    unmapped: int
    evictions: int
    messages: int
    served: float


class Result(Struct, frozen=True):
    """One run.

    Attributes:
        hosts: shares at the end, by KINDS, then by host.
        use: of these.
        counts: see infiniswap.simulation.exchange.COUNTS.
        messages: requests and answers by kind.
        messages_per_slab: of all messages, for each slab that was mapped; None: none was.
        rows: the time line.
    """

    scenario: str
    rule: str
    seed: int
    hosts: dict[str, list[float]]
    use: dict[str, Spread]
    counts: dict[str, int]
    messages: dict[str, int]
    messages_per_slab: float | None
    served_mean: float
    rows: list[Row]
