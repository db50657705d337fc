# SPDX-License-Identifier: Apache-2.0
"""Metrics without their format: what is declared, and the values of one moment.

`infiniswap.control.exposition` writes them in Prometheus' format; its library takes a while to
import, which only a process that is asked for its metrics has to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the format."""

METRICS_PATH: Final = "/metrics"

_NS_PER_S: Final = 1_000_000_000
_BOUND_BITS: Final = range(12, 34)
"""Histograms are shown with one bucket per power of two, from 4.1 µs to 8.6 s."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; units last in its name, base units, `_total` for counters.

    Attributes:
        name: as it is exported.
        kind: counter, gauge or histogram.
        help: one sentence.
        labels: names of its own labels.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """Of durations.

    Attributes:
        buckets: upper bound in seconds as text, and how many were within it.
        sum_s: of all.
    """

    buckets: tuple[tuple[str, int], ...]
    sum_s: float


Value = float | Histogram


@dataclass(frozen=True, slots=True)
class Figures:
    """Values of declared metrics.

    Attributes:
        metrics: everything declared, in the order of the page; also what has no value now.
        common: labels of every value.
    """

    metrics: Sequence[Metric]
    common: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, dict[tuple[str, ...], Value]] = field(default_factory=dict)
    """By metric, then by its own labels' values."""

    def set(self, name: str, value: Value, *labels: str) -> None:
        """One value; `labels` in the declared order."""
        self.values.setdefault(name, {})[labels] = value


def histogram(counts: Sequence[int], bounds_ns: Sequence[int]) -> Histogram:
    """A histogram of the engine's with fewer buckets.

    The sum is put together from the middles of the engine's fine buckets, so it is at most 1/16
    off: an exact one would cost each request a write to memory that all threads share.

    Args:
        counts: how many in each bucket.
        bounds_ns: their upper bounds.
    """
    shown: list[tuple[str, int]] = []
    seen, low_ns, sum_ns = 0, 0, 0.0
    limits = iter([1 << bit for bit in _BOUND_BITS])
    limit = next(limits, None)
    for count, bound_ns in zip(counts, bounds_ns, strict=True):
        seen += count
        sum_ns += count * (low_ns + bound_ns) / 2
        low_ns = bound_ns
        if bound_ns == limit:
            shown.append((repr(limit / _NS_PER_S), seen))
            limit = next(limits, None)
    shown.append(("+Inf", seen))
    return Histogram(tuple(shown), sum_ns / _NS_PER_S)
