# SPDX-License-Identifier: Apache-2.0
"""Metrics without their format: their declarations, and the values of one moment.

`infiniswap.control.exposition` writes them in Prometheus' format; its library takes a while to
import, which only a process that is asked for its metrics has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, Final, Generic, Literal, TypeVar

SourceT = TypeVar("SourceT")
Kind = Literal["counter", "gauge", "histogram"]

PAGE_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the format."""

METRICS_PATH: Final = "/metrics"

_NS_PER_S: Final = 1_000_000_000
_BOUND_BITS: Final = range(12, 34)
"""Histograms are shown with one bucket per power of two, from 4.1 µs to 8.6 s."""


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
Values = Value | Mapping[Any, Value]
"""One value, or one for each value of the label; with several labels for each tuple of values."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[SourceT]):
    """One metric; units last in its name, base units, `_total` for counters.

    Attributes:
        name: as it is exported.
        kind: counter, gauge or histogram.
        help: one sentence, for the page and for docs/metrics.md.
        read: takes the values from their source.
        labels: names of its own labels.
        notes: what docs/metrics.md says besides.
    """

    name: str
    kind: Kind
    help: str
    read: Callable[[SourceT], Values]
    labels: tuple[str, ...] = ()
    notes: str = ""


class Declarer(Generic[SourceT]):
    """Declares metrics whose names begin with the same words, and that read the same source."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def _one(
        self,
        kind: Kind,
        name: str,
        help_text: str,
        read: Callable[[SourceT], Values],
        *labels: str,
        notes: str = "",
    ) -> Metric[SourceT]:
        return Metric(self._prefix + name, kind, help_text, read, labels, notes)

    gauge, counter = partialmethod(_one, "gauge"), partialmethod(_one, "counter")
    histogram = partialmethod(_one, "histogram")

    def each(
        self,
        kind: Kind,
        read: Callable[[str], Callable[[SourceT], Values]],
        *rows: tuple[str, str, str],
        labels: tuple[str, ...] = (),
    ) -> Iterator[Metric[SourceT]]:
        """Metrics from one place; each row has a name, a help text, and the field there."""
        return (self._one(kind, name, text, read(field), *labels) for name, text, field in rows)


@dataclass(frozen=True, slots=True)
class Figures:
    """Values of declared metrics at one moment.

    Attributes:
        metrics: everything declared, in the order of the page; also what has no value now.
        values: by metric, then by its own labels' values.
        common: labels of every value.
    """

    metrics: Sequence[Metric[Any]]
    values: Mapping[str, Mapping[tuple[str, ...], Value]]
    common: Mapping[str, str] = field(default_factory=dict)


def figures(metrics: Sequence[Metric[SourceT]], source: SourceT, **common: str) -> Figures:
    """Reads every metric.

    Args:
        metrics: everything declared.
        source: what they read.
        common: labels of every value.
    """
    return Figures(metrics, {m.name: _by_labels(m.read(source)) for m in metrics}, common)


def _by_labels(values: Values) -> dict[tuple[str, ...], Value]:
    if not isinstance(values, Mapping):
        return {(): values}
    return {(key,) if isinstance(key, str) else key: value for key, value in values.items()}


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
