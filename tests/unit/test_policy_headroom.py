# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.headroom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.headroom import (
    HarvestPlan,
    HeadroomConfig,
    HeadroomPolicy,
    PoolState,
    pool_bytes_auto,
)
from infiniswap.units import GIB

HOST = 64 * GIB
CONFIG = HeadroomConfig(slab_bytes=GIB, headroom_bytes=8 * GIB, pool_bytes_max=48 * GIB)
POOL = st.builds(PoolState, st.integers(0, 60), st.integers(0, 5), st.integers(0, 60))


def after(
    others_bytes: list[int], pool: PoolState, config: HeadroomConfig = CONFIG, total: int = HOST
) -> HarvestPlan:
    policy = HeadroomPolicy(config)
    for second, others in enumerate(others_bytes):
        policy.observe(float(second), total, total - others - pool.total * config.slab_bytes, pool)
    return policy.plan(pool)


def test_an_idle_host_fills_its_pool() -> None:
    assert after([4 * GIB], PoolState(0, 0, 0)) == HarvestPlan(48, 0, 0)
    assert after([16 * GIB], PoolState(0, 0, 0)) == HarvestPlan(40, 0, 0)


def test_a_target_bounds_what_is_kept_ready() -> None:
    config = replace(CONFIG, free_slabs_max=2)
    assert after([GIB], PoolState(0, 0, 3), config) == HarvestPlan(2, 0, 0)
    assert after([GIB], PoolState(1, 1, 3), config) == HarvestPlan(0, 0, 0)
    assert after([GIB], PoolState(5, 0, 3), config) == HarvestPlan(0, 3, 0)


def test_a_busy_host_gets_free_slabs_back_then_mapped_ones() -> None:
    pool = PoolState(free=3, dirty=1, mapped=10)
    assert after([43 * GIB], pool) == HarvestPlan(0, 1, 0)
    assert after([46 * GIB], pool) == HarvestPlan(0, 4, 0)
    assert after([48 * GIB], pool) == HarvestPlan(0, 4, 2, broken=True)


def test_a_spike_releases_free_slabs_but_evicts_nothing() -> None:
    pool = PoolState(free=2, dirty=0, mapped=10)
    plan = after([30 * GIB] * 20 + [50 * GIB], pool)
    assert plan.release == 2
    assert plan.evict == 0


def test_what_is_taken_suddenly_and_deeply_does_not_wait_for_the_average() -> None:
    pool = PoolState(free=2, dirty=0, mapped=10)
    # 60 GiB of others leave nothing: two free slabs go, and what the full headroom still lacks.
    assert after([30 * GIB] * 20 + [60 * GIB], pool) == HarvestPlan(
        0, 2, 10, urgent=True, broken=True
    )
    assert after([30 * GIB] * 20 + [51 * GIB], pool) == HarvestPlan(
        0, 2, 5, urgent=True, broken=True
    )


def test_the_slack_is_what_is_left_before_that() -> None:
    policy = HeadroomPolicy(CONFIG)
    pool = PoolState(free=5, dirty=1, mapped=10)
    policy.observe(0.0, HOST, HOST - 20 * GIB - 16 * GIB, pool)
    assert policy.slack_bytes == (64 - 4 - 20 - 10) * GIB


def test_noise_below_the_hysteresis_changes_nothing() -> None:
    config = replace(CONFIG, hysteresis_bytes=GIB // 2)
    policy = HeadroomPolicy(config)
    pool = PoolState(0, 0, 0)
    for second in range(200):
        others = 20 * GIB + (second % 7) * GIB // 16
        policy.observe(float(second), HOST, HOST - others - pool.total * GIB, pool)
        plan = policy.plan(pool)
        assert second < 20 or plan == HarvestPlan(0, 0, 0)
        pool = PoolState(pool.free + plan.grow - plan.release, 0, 0)


@given(
    st.lists(st.integers(0, HOST), min_size=1, max_size=8),
    POOL,
    st.none() | st.integers(0, 8),
    st.integers(0, 2 * GIB),
    st.integers(0, 70 * GIB),
)
def test_a_plan_is_always_within_what_there_is(
    others: list[int], pool: PoolState, ready: int | None, hysteresis: int, limit: int
) -> None:
    config = replace(
        CONFIG, free_slabs_max=ready, hysteresis_bytes=hysteresis, pool_bytes_max=limit
    )
    plan = after(others, pool, config)
    assert min(plan.grow, plan.release, plan.evict) >= 0
    # Never a mapped slab among those released, never more taken back than is lent.
    assert plan.release <= pool.free + pool.dirty
    assert plan.evict <= pool.mapped
    assert plan.grow == 0 or (plan.release == 0 and plan.evict == 0)
    assert pool.total + plan.grow <= max(pool.total, config.slabs_max)


@given(st.integers(0, HOST), POOL)
def test_growing_never_eats_into_the_headroom(others: int, pool: PoolState) -> None:
    plan = after([others], pool)
    if plan.grow:
        left = HOST - others - (pool.total + plan.grow) * GIB
        assert left >= CONFIG.headroom_bytes


@given(st.integers(0, HOST), POOL, st.integers(0, 2 * GIB))
def test_a_carried_out_plan_needs_no_correction(
    others: int, pool: PoolState, hysteresis: int
) -> None:
    config = replace(CONFIG, hysteresis_bytes=hysteresis)
    plan = after([others], pool, config)
    if plan.evict:
        return
    gone_dirty = min(pool.dirty, plan.release)
    settled = PoolState(
        pool.free + plan.grow - (plan.release - gone_dirty), pool.dirty - gone_dirty, pool.mapped
    )
    assert after([others], settled, config) == HarvestPlan(0, 0, 0)


def test_nothing_is_planned_before_the_first_figures() -> None:
    policy = HeadroomPolicy(CONFIG)
    assert policy.plan(PoolState(1, 1, 1)) == HarvestPlan(0, 0, 0)
    assert policy.slabs_mappable(PoolState(3, 0, 0)) == 3
    assert policy.used_share(PoolState(0, 0, 0)) == 1.0


@given(st.integers(0, 2 * HOST), st.integers(0, 2 * HOST), POOL)
def test_the_share_is_a_share(total: int, available: int, pool: PoolState) -> None:
    policy = HeadroomPolicy(CONFIG)
    policy.observe(0.0, total, available, pool)
    assert 0.0 <= policy.used_share(pool) <= 1.0


def test_lent_slabs_count_as_used_and_free_ones_do_not() -> None:
    policy = HeadroomPolicy(CONFIG)
    pool = PoolState(free=8, dirty=0, mapped=16)
    policy.observe(0.0, HOST, HOST - (16 + 24) * GIB, pool)
    assert policy.used_share(pool) == pytest.approx((16 + 16) / 64)


def test_an_automatic_pool_is_what_the_headroom_leaves() -> None:
    assert pool_bytes_auto(64 * GIB, 8 * GIB, GIB) == 56 * GIB
    assert pool_bytes_auto(64 * GIB - 1, 8 * GIB, GIB) == 55 * GIB
    assert pool_bytes_auto(4 * GIB, 8 * GIB, GIB) == 0


@pytest.mark.parametrize("field", ["headroom_bytes", "pool_bytes_max", "hysteresis_bytes"])
def test_negative_limits_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: -1})
    with pytest.raises(ValueError, match="slab size"):
        replace(CONFIG, slab_bytes=0)
