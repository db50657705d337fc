# SPDX-License-Identifier: Apache-2.0
"""The time of a job at each memory limit: its time without one, and what its pages cost.

A second run at one limit tells what a page costs this job on this host: the time that it lost, and
the pages that it moved. Where it moved too few to tell, earlier plans on this host say what a page
costs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from infiniswap.planning.misses import Sample, peak_bytes, time_at, traffic
from infiniswap.units import MIB, PAGE_BYTES

SHARES: Final = (100, 95, 90, 85, 80, 75, 70, 65, 60, 55, 50, 45, 40, 35, 30, 25)
"""Limits that are predicted, percent of the job's peak."""

OUT_WEIGHT: Final = 0.35
"""What a first page-out costs, in page-ins: the job waits for less of it."""

_PAGE_S: Final = 60e-6
"""Of a page-in, where nothing has been measured."""

_READING_MAX: Final = 4.0
"""More page-ins for one of the curve come from uses that are too quick for the looks."""

_FEW_PAGES: Final = 2000.0
"""A probe that has moved so many pages counts as much as what is known from earlier plans."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A run at a limit, or its beginning.

    Attributes:
        limit_bytes: its limit.
        elapsed_s: it ran for so long.
        user_s: processor time in user mode, its progress; None: it came to its end.
        page_ins: and `page_outs`, of the device.
    """

    limit_bytes: int
    elapsed_s: float
    user_s: float | None
    page_ins: int
    page_outs: int


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
    """The prediction for one limit.

    Attributes:
        elapsed_s: time of the job.
        slowdown: the same, as a multiple of its time without a limit.
        page_ins: pages that come back.
        remote_bytes: what the limit leaves to donors, at the job's peak.
    """

    limit_bytes: int
    elapsed_s: float
    slowdown: float
    page_ins: int
    remote_bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """A job on this host.

    Attributes:
        samples: of the run without a limit.
        elapsed_s: time of that run.
        page_s: what a page costs.
        reading: page-ins for one of the curve.
        unseen: page-ins for each byte that does not fit, beyond that.
        from_history: share of `page_s` that comes from earlier plans.
    """

    samples: Sequence[Sample]
    elapsed_s: float
    page_s: float
    reading: float
    unseen: float
    from_history: float

    @property
    def peak_bytes(self) -> int:
        """The most memory of the job."""
        return peak_bytes(self.samples)

    def at(self, limit_bytes: int) -> Point:
        """The prediction. With more memory it never says more time."""
        moved = traffic(self.samples, limit_bytes)
        remote_bytes = max(0, self.peak_bytes - limit_bytes)
        ins = moved.ins * self.reading + remote_bytes * self.unseen
        elapsed_s = self.elapsed_s + (ins + moved.outs * OUT_WEIGHT) * self.page_s
        slowdown = elapsed_s / self.elapsed_s
        return Point(limit_bytes, elapsed_s, slowdown, round(ins), remote_bytes)

    def curve(self) -> tuple[Point, ...]:
        """From the whole peak down."""
        return tuple(self.at(limit_of(self.peak_bytes, share)) for share in SHARES)

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


def measured(samples: Sequence[Sample], elapsed_s: float, probe: Probe) -> Measured:
    """What a probe has measured: its pages, and the time that it was behind."""
    without_s = elapsed_s if probe.user_s is None else time_at(samples, probe.user_s)
    first = traffic(samples, probe.limit_bytes, probe.user_s).outs
    pages = probe.page_ins + min(first, float(probe.page_outs)) * OUT_WEIGHT
    return Measured(pages, max(0.0, probe.elapsed_s - without_s))


def fit(
    samples: Sequence[Sample],
    elapsed_s: float,
    probe: Probe | None,
    history: Sequence[Measured] = (),
) -> Model:
    """The model of a job.

    Args:
        samples: of its run without a limit.
        elapsed_s: time of that run.
        probe: of its run with one; None: there was none.
        history: what earlier plans measured on this host.
    """
    known_s = _cost(history)
    if probe is None:
        return Model(samples, elapsed_s, known_s, 1.0, 0.0, 1.0)
    expected = traffic(samples, probe.limit_bytes, probe.user_s)
    reading = min(_READING_MAX, _ratio(probe.page_ins, expected.ins, 1.0))
    own = measured(samples, elapsed_s, probe)
    return Model(
        samples,
        elapsed_s,
        _ratio(own.lost_s, own.pages, known_s),
        reading,
        _unseen(samples, probe, probe.page_ins - reading * expected.ins),
        _FEW_PAGES**2 / (own.pages**2 + _FEW_PAGES**2),
    )


def _unseen(samples: Sequence[Sample], probe: Probe, pages: float) -> float:
    """Of the whole job, from what the probe had beyond the curve: as if used at random."""
    remote_bytes = peak_bytes(samples) - probe.limit_bytes
    whole_s = samples[-1].user_s if samples else 0.0
    share = 1.0 if probe.user_s is None or not whole_s else min(1.0, probe.user_s / whole_s)
    if pages < _FEW_PAGES or remote_bytes <= 0 or not share:
        return 0.0
    return pages / share / remote_bytes


def _ratio(y: float, x: float, known: float) -> float:
    """Least squares through the origin, drawn to what is known where x is small (ridge)."""
    return (x * y + _FEW_PAGES**2 * known) / (x * x + _FEW_PAGES**2)


def _cost(history: Sequence[Measured]) -> float:
    """Least squares through the origin: seconds for a page."""
    pages = sum(each.pages * each.pages for each in history)
    return sum(each.pages * each.lost_s for each in history) / pages if pages else _PAGE_S
