# SPDX-License-Identifier: Apache-2.0
"""The time of a job at each memory limit: its time without one, and what its pages cost.

A run with a limit tells which pages move at which limit (`misses`), and what a page costs
this job on this host: the time that it lost, by the pages that it moved. Where it moved too few to
tell, earlier plans on this host say what a page costs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from infiniswap.planning.misses import Curve, First, Look, Miss
from infiniswap.units import MIB, PAGE_BYTES

Source = Literal["measured", "estimated", "at least"]
"""Where a time comes from: a run with that limit to its end; the pages that came back in another
run; or what was seen until a limit was taken away, so that the time may be longer."""

OUT_WEIGHT: Final = 0.35
"""What a page-out costs, in page-ins: the job waits for less of it."""

_PAGE_S: Final = 60e-6
"""Of a page-in, where nothing has been measured."""

_FEW_PAGES: Final = 2000.0
"""A run that has moved so many pages counts as much as what is known from earlier plans."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A run with limits, to its end.

    Attributes:
        elapsed_s: its time.
        share_limited: of the job's work that it did before the limit was taken away.
        limit_bytes: the lowest one.
        page_ins: and `page_outs`, of the device.
        found: the page-ins, each with what it needs; empty: they could not be told apart.
        looks: at it, in order.
        first: pages that went out first.
        is_cut: the limit was taken away before the end.
    """

    elapsed_s: float
    share_limited: float
    limit_bytes: int
    page_ins: int
    page_outs: int
    found: Sequence[Miss]
    looks: Sequence[Look]
    first: First = First()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan has measured of pages on this host, for later ones.

    Attributes:
        pages: moved, page-outs with OUT_WEIGHT.
        lost_s: time that this took.
    """

    pages: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """What one limit costs.

    Attributes:
        elapsed_s: time of the job.
        slowdown: the same, as a multiple of its time without a limit.
        page_ins: pages that come back.
        remote_bytes: what the limit leaves to donors, at the job's peak.
        source: of the time and the page-ins.
    """

    limit_bytes: int
    elapsed_s: float
    slowdown: float
    page_ins: int
    remote_bytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class Model:
    """A job on this host.

    Attributes:
        elapsed_s: its time without a limit.
        peak_bytes: the most memory that it used.
        held_bytes: the most that it held, with what it had given up and may take again.
        curve: page-ins against the limit.
        seen: page-ins that were seen at least, where the limit was taken away before the end;
            None: it was not.
        outs_again: page-outs for each page-in, beyond the first one of each page.
        page_s: what a page costs.
        from_history: share of `page_s` that comes from earlier plans.
    """

    elapsed_s: float
    peak_bytes: int
    held_bytes: int
    curve: Curve
    seen: Curve | None
    outs_again: float
    page_s: float
    from_history: float

    def at(self, limit_bytes: int) -> Point:
        """The prediction. With more memory it never says more time."""
        return self._by(self.curve, limit_bytes, "estimated")

    def known(self, limit_bytes: int) -> Point:
        """The prediction, or the least that it may be where not all of the job was seen."""
        if self.seen is None:
            return self.at(limit_bytes)
        return self._by(self.seen, limit_bytes, "at least")

    def ran(self, limit_bytes: int, elapsed_s: float, page_ins: int, source: Source) -> Point:
        """The point of a run."""
        remote_bytes = max(0, self.peak_bytes - limit_bytes)
        slowdown = elapsed_s / self.elapsed_s
        return Point(limit_bytes, elapsed_s, slowdown, page_ins, remote_bytes, source)

    def _by(self, curve: Curve, limit_bytes: int, source: Source) -> Point:
        ins = curve.at(limit_bytes)
        outs = ins * self.outs_again + max(0, self.peak_bytes - limit_bytes) / PAGE_BYTES
        elapsed_s = self.elapsed_s + (ins + outs * OUT_WEIGHT) * self.page_s
        return self.ran(limit_bytes, elapsed_s, round(ins), source)

    def smallest(self, slowdown: float) -> Point:
        """The least limit, in whole MiB, with at most that slowdown."""
        low, high = 1, max(1, -(-self.peak_bytes // MIB))  # at `high` nothing is paged
        while low < high:
            middle = (low + high) // 2
            if self.at(middle * MIB).slowdown <= slowdown:
                high = middle
            else:
                low = middle + 1
        return self.at(high * MIB)


def limit_of(peak: int, share: int) -> int:
    """That percentage of it, in whole pages."""
    return peak * share // 100 // PAGE_BYTES * PAGE_BYTES


def measured(elapsed_s: float, probe: Probe) -> Measured:
    """What a probe has measured: its pages, and the time that it was behind."""
    pages = probe.page_ins + probe.page_outs * OUT_WEIGHT
    return Measured(pages, max(0.0, probe.elapsed_s - elapsed_s))


def fit(
    elapsed_s: float,
    peak_bytes: int,
    probe: Probe,
    history: Sequence[Measured] = (),
    *,
    held_bytes: int = 0,
) -> Model:
    """The model of a job.

    Args:
        elapsed_s: time of its run without a limit.
        peak_bytes: the most memory that it used.
        probe: of its run with one.
        history: what earlier plans measured on this host.
        held_bytes: the most that it held, with what it had given up and may take again.
    """
    own = measured(elapsed_s, probe)
    first = max(0, peak_bytes - probe.limit_bytes) / PAGE_BYTES
    again = max(0.0, probe.page_outs - first) / probe.page_ins if probe.page_ins else 0.0
    found = probe.found or _evenly(probe, peak_bytes)
    seen = Curve(found, probe.looks, peak_bytes, scaled=False) if probe.is_cut else None
    return Model(
        elapsed_s,
        peak_bytes,
        max(held_bytes, peak_bytes),
        Curve(found, probe.looks, peak_bytes, probe.first),
        seen,
        min(1.0, again),
        _ratio(own.lost_s, own.pages, _cost(history)),
        _FEW_PAGES**2 / (own.pages**2 + _FEW_PAGES**2),
    )


def _evenly(probe: Probe, peak_bytes: int) -> list[Miss]:
    """As if the pages were used at random."""
    parts = 64
    limit, wide = probe.limit_bytes, max(0, peak_bytes - probe.limit_bytes)
    each = probe.page_ins / parts
    return [Miss(limit, limit + wide * (part + 1) // parts, each) for part in range(parts)]


def _ratio(y: float, x: float, known: float) -> float:
    """Least squares through the origin, drawn to what is known where x is small (ridge)."""
    return (x * y + _FEW_PAGES**2 * known) / (x * x + _FEW_PAGES**2)


def _cost(history: Sequence[Measured]) -> float:
    """Least squares through the origin: seconds for a page."""
    pages = sum(each.pages * each.pages for each in history)
    return sum(each.pages * each.lost_s for each in history) / pages if pages else _PAGE_S
