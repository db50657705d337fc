# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and ratios of paired samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its interquartile range."""

    median: float
    q1: float
    q3: float
    count: int


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0..1), linear between neighbours (method 7 of Hyndman and Fan, "Sample
    quantiles in statistical packages", 1996).

    Raises:
        ValueError: no values, or q out of range.
    """
    if not values or not 0.0 <= q <= 1.0:
        raise ValueError("a quantile needs values, and q between 0 and 1")
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = ordered[math.floor(at)]
    high = ordered[math.ceil(at)]
    return low if low == high else low + (high - low) * (at % 1)  # both may be infinite


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    Raises:
        ValueError: no values.
    """
    return Spread(
        median=quantile(values, 0.5),
        q1=quantile(values, 0.25),
        q3=quantile(values, 0.75),
        count=len(values),
    )


def pair_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours[i] / theirs[i] of the same round. Where the other side measured nothing (zero), the
    ratio is infinite, so that it cannot pass for a good "at most"; zero over zero is one.

    Raises:
        ValueError: not the same number of rounds.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of ours and {len(theirs)} of the other side")
    return [_ratio(a, b) for a, b in zip(ours, theirs, strict=True)]


def _ratio(a: float, b: float) -> float:
    if b:
        return a / b
    return math.inf if a else 1.0
