# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.sampling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.sampling import SamplingConfig, sample_s
from infiniswap.units import GIB

CONFIG = SamplingConfig()


def test_an_idle_host_is_left_alone() -> None:
    assert sample_s(CONFIG, 32 * GIB, 4) == 1.0
    assert sample_s(CONFIG, -GIB, 0) == 1.0  # nothing to give back


def test_a_host_that_is_nearly_short_is_watched() -> None:
    assert sample_s(CONFIG, 0, 1) == 0.05
    assert sample_s(CONFIG, -GIB, 1) == 0.05
    assert sample_s(CONFIG, 4 * GIB, 1) == 0.25


@given(st.integers(-(1 << 40), 1 << 45), st.integers(0, 1000))
def test_nothing_can_be_missed_for_longer_than_the_shortest_pause(slack: int, slabs: int) -> None:
    pause_s = sample_s(CONFIG, slack, slabs)
    assert CONFIG.sample_s_min <= pause_s <= CONFIG.sample_s_max
    if slabs and pause_s > CONFIG.sample_s_min:
        # Whoever touches memory as fast as can be has not used the slack up by then.
        assert pause_s * CONFIG.touch_bytes_per_s <= slack * (1 + 1e-9)


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1), (2.0, 1.0, 1), (0.1, 1.0, 0)])
def test_nonsense_is_refused(bad: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match=r"pauses|bytes per second"):
        SamplingConfig(*bad)
