# SPDX-License-Identifier: Apache-2.0
"""Exponentially weighted moving average over irregular ticks."""

from __future__ import annotations


def decay(weight: float, periods: float) -> float:
    """What is left of the old value after `periods` (may be a fraction) without looking.

    `k` updates with the same measurement leave `(1 - weight)^k` of the old value, so one update
    that comes `k` periods late counts as much as `k` punctual ones of their mean.
    """
    return float((1.0 - weight) ** periods)


def blend(old: float, measured: float, weight: float, periods: float = 1.0) -> float:
    """`measured·(1 - d) + old·d` with `d = decay(weight, periods)`; normalised.

    With `periods` = 1 this is the paper's `weight·measured + (1 - weight)·old`. The result lies
    between `old` and `measured`, also after rounding.
    """
    left = decay(weight, periods)
    value = measured + (old - measured) * left
    return min(max(value, min(old, measured)), max(old, measured))


class Ewma:
    """A moving average that starts with its first measurement.

    Args:
        weight: of a measurement that comes one period after the last one, 0 < weight <= 1.
        period_s: nominal distance of measurements in seconds.
    """

    __slots__ = ("_period_s", "_updated_s", "_value", "_weight")

    def __init__(self, weight: float, period_s: float = 1.0) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"weight {weight} is not within (0, 1]")
        if period_s <= 0.0:
            raise ValueError(f"period {period_s} s is not above zero")
        self._weight = weight
        self._period_s = period_s
        self._value: float | None = None
        self._updated_s = 0.0

    @property
    def value(self) -> float | None:
        """The average, None before the first measurement."""
        return self._value

    def update(self, now_s: float, measured: float) -> float:
        """Takes a measurement made at `now_s` and returns the new average.

        A measurement no later than the last one changes nothing: it has no weight.
        """
        if self._value is None:
            self._value = float(measured)
        elif now_s > self._updated_s:
            periods = (now_s - self._updated_s) / self._period_s
            self._value = blend(self._value, float(measured), self._weight, periods)
        else:
            return self._value
        self._updated_s = now_s
        return self._value
