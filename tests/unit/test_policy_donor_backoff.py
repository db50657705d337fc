# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.donor_backoff."""

from __future__ import annotations

from collections.abc import Iterable

from infiniswap.policy.donor_backoff import BackoffConfig, DonorBackoff


def eligible(backoff: DonorBackoff[str], donors: Iterable[str], now_s: float) -> list[str]:
    return [donor for donor in donors if backoff.is_eligible(donor, now_s)]


def test_an_unreachable_donor_is_asked_again_later_and_later() -> None:
    backoff: DonorBackoff[str] = DonorBackoff(BackoffConfig(unreachable_s=1, unreachable_s_max=4))
    waits = []
    now_s = 100.0
    for _ in range(4):
        backoff.unreachable("a", now_s)
        assert eligible(backoff, ["a", "b"], now_s) == ["b"]
        retry_s = backoff.retry_s(["a", "b"], now_s)
        assert retry_s is not None
        waits.append(retry_s - now_s)
        now_s = retry_s
        assert eligible(backoff, ["a", "b"], now_s) == ["a", "b"]
    assert waits == [1, 2, 4, 4]
    backoff.good("a")
    backoff.unreachable("a", now_s)
    assert backoff.retry_s(["a"], now_s) == now_s + 1


def test_a_full_donor_waits_a_fixed_time() -> None:
    backoff: DonorBackoff[str] = DonorBackoff(BackoffConfig(full_s=2))
    backoff.full("a", 0.0)
    backoff.full("a", 0.0)
    assert eligible(backoff, ["a"], 1.9) == []
    assert eligible(backoff, ["a"], 2.0) == ["a"]
    assert backoff.retry_s(["b"], 0.0) is None


def test_failures_without_end_do_not_overflow() -> None:
    backoff: DonorBackoff[str] = DonorBackoff()
    for _ in range(5000):
        backoff.unreachable("a", 0.0)
    assert backoff.retry_s(["a"], 0.0) == 30.0


def test_distrust_lasts_longer_each_time_and_is_forgiven() -> None:
    config = BackoffConfig(distrust_s=10.0, distrust_s_max=100.0)
    backoff: DonorBackoff[str] = DonorBackoff(config)
    now_s = 0.0
    for wait_s in (10.0, 20.0, 40.0, 80.0, 100.0, 100.0):
        assert backoff.distrusted("liar", now_s) == wait_s
        # Nothing that happens meanwhile shortens it.
        backoff.full("liar", now_s)
        backoff.unreachable("liar", now_s)
        assert not eligible(backoff, ["liar"], now_s + wait_s - 1)
        now_s += wait_s
        assert eligible(backoff, ["liar"], now_s)
        backoff.good("liar")
    assert backoff.distrusted("liar", now_s + 101.0) == 10.0


def test_a_donor_that_is_no_longer_configured_is_forgotten() -> None:
    backoff: DonorBackoff[str] = DonorBackoff()
    backoff.distrusted("liar", 0.0)
    backoff.forget("liar")
    assert eligible(backoff, ["liar"], 0.0)
    assert backoff.distrusted("liar", 0.0) == BackoffConfig().distrust_s
