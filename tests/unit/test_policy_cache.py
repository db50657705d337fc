# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.cache import CacheConfig, CacheUse
from infiniswap.units import GIB, MIB


def test_cache_that_nobody_reads_again_is_free() -> None:
    cache = CacheUse()
    for second in range(100):
        assert cache.observe(float(second), 7 * GIB, 20 * GIB) == 0


def test_refaults_make_the_whole_cache_count_and_what_it_lacks() -> None:
    cache = CacheUse()
    cache.observe(0.0, 0, 2 * GIB)
    assert cache.observe(1.0, 100 * MIB, 2 * GIB) == 2 * GIB + 100 * MIB
    assert cache.used_bytes == 2 * GIB + 100 * MIB


def test_a_few_refaults_are_noise() -> None:
    cache = CacheUse()
    cache.observe(0.0, 0, 2 * GIB)
    assert cache.observe(1.0, MIB // 2, 2 * GIB) == 0
    # The same number in a tenth of the time is none.
    assert cache.observe(1.1, MIB, 2 * GIB) > 0


def test_cache_that_suffices_stays_counted_for_a_while_then_is_forgotten() -> None:
    config = CacheConfig(hold_s=10.0, half_s=10.0)
    cache = CacheUse(config)
    cache.observe(0.0, 0, 4 * GIB)
    cache.observe(1.0, 50 * MIB, 4 * GIB)
    counted = [cache.observe(float(second), 50 * MIB, 4 * GIB) for second in range(2, 400)]
    assert counted[:9] == [4 * GIB] * 9
    assert counted == sorted(counted, reverse=True)
    assert counted[-1] == 0


def test_a_counter_that_starts_anew_is_no_refault() -> None:
    cache = CacheUse()
    cache.observe(0.0, 9 * GIB, GIB)
    assert cache.observe(1.0, 0, GIB) == 0


@given(
    st.lists(
        st.tuples(st.floats(0.0, 1e6), st.integers(0, 1 << 50), st.integers(0, 1 << 50)),
        max_size=30,
    )
)
def test_never_more_than_there_is_or_was_missing(
    readings: list[tuple[float, int, int]],
) -> None:
    cache = CacheUse()
    last = 0
    for now_s, refaulted, file_bytes in readings:  # the clock may stand still or jump back
        before = cache.used_bytes
        used = cache.observe(now_s, refaulted, file_bytes)
        assert used == before or 0 <= used <= file_bytes + max(0, refaulted - last)
        last = refaulted
