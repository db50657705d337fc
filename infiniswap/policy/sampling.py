# SPDX-License-Identifier: Apache-2.0
"""How soon a donor reads its memory figures again.

A donor must react to a sudden allocation in under 100 ms, and an idle host should pay nothing. So
the pause depends on how much the host may still take: programs cannot use memory faster than the
kernel zeroes pages, so while much is left there is no need to look.
"""

from __future__ import annotations

from dataclasses import dataclass

from infiniswap.units import GIB


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Bounds of the pause.

    Attributes:
        sample_s_min: pause where memory is short, or nearly so.
        sample_s_max: pause where there is plenty, or nothing to give back.
        touch_bytes_per_s: how fast a host can fill memory; a processor zeroes pages at a few GiB/s.
    """

    sample_s_min: float = 0.05
    sample_s_max: float = 1.0
    touch_bytes_per_s: int = 16 * GIB

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_s_min <= self.sample_s_max:
            raise ValueError(f"pauses {self.sample_s_min} and {self.sample_s_max} s")
        if self.touch_bytes_per_s <= 0:
            raise ValueError(f"{self.touch_bytes_per_s} bytes per second are not above zero")


def sample_s(config: SamplingConfig, slack_bytes: int, slabs: int) -> float:
    """Pause until the figures are read again, in seconds.

    Args:
        config: bounds.
        slack_bytes: what the host may take before slabs are needed back; may be negative.
        slabs: those that occupy memory. Without any there is nothing to give back.
    """
    if slabs <= 0:
        return config.sample_s_max
    pause_s = slack_bytes / config.touch_bytes_per_s
    return min(config.sample_s_max, max(config.sample_s_min, pause_s))
