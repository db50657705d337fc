# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.trust, and what DonorBook makes of it."""

from __future__ import annotations

from errno import ECONNRESET, EPROTO, ETIMEDOUT

import pytest

from infiniswap.policy.placement import BackoffConfig, DonorBook
from infiniswap.policy.trust import Trust, TrustConfig


def test_a_broken_protocol_is_enough() -> None:
    assert "protocol" in Trust().lost(0.0, -EPROTO)


@pytest.mark.parametrize("code", [-ECONNRESET, -ETIMEDOUT])
def test_connections_lost_right_after_each_recovery_count(code: int) -> None:
    trust = Trust(TrustConfig(flap_s=5.0, flaps_max=3))
    assert not trust.lost(0.0, code)
    for now_s in (1.0, 3.0):
        trust.recovered(now_s)
        assert not trust.lost(now_s + 1.0, code)
    trust.recovered(5.0)
    assert trust.lost(6.0, code)


def test_a_loss_now_and_then_does_not() -> None:
    trust = Trust(TrustConfig(flap_s=5.0, flaps_max=2))
    for now_s in range(0, 1000, 10):
        assert not trust.lost(float(now_s), -ECONNRESET)
        trust.recovered(now_s + 1.0)


def test_one_loss_counts_once() -> None:
    trust = Trust(TrustConfig(flap_s=5.0, flaps_max=2))
    trust.recovered(0.0)
    for _ in range(10):
        assert not trust.lost(1.0, -ECONNRESET)


def test_losses_that_were_announced_do_not_count() -> None:
    """A slab taken by force costs the connections, however many are in a row."""
    trust = Trust(TrustConfig(flap_s=5.0, flaps_max=2, announced_s=5.0, announced_s_max=60.0))
    now_s = 0.0
    for generation in range(10):
        trust.recovered(now_s)
        trust.announce(generation, now_s, 1.0)
        now_s += 2.0
        assert not trust.lost(now_s, -ECONNRESET)
        assert trust.is_excused
    # What lies excuses nothing, and no announcement lasts for ever.
    trust.announce(98, now_s, 1.0)
    assert trust.lost(now_s, -EPROTO)
    assert not trust.is_excused
    trust.announce(99, now_s, 1e9)
    assert not trust.lost(now_s + 66.0, -ECONNRESET)
    assert not trust.is_excused
    # Nor one that was done with in time.
    trust.announce(100, now_s, 10.0)
    trust.withdraw(100)
    trust.recovered(now_s + 20.0)
    assert not trust.lost(now_s + 21.0, -ECONNRESET)
    trust.recovered(now_s + 22.0)
    assert trust.lost(now_s + 23.0, -ECONNRESET)


def test_one_announcement_excuses_one_loss() -> None:
    trust = Trust(TrustConfig(flap_s=5.0, flaps_max=2))
    trust.announce(1, 0.0, 30.0)
    trust.announce(2, 0.0, 10.0)
    for now_s, excused in ((1.0, True), (2.0, True), (3.0, False)):
        trust.recovered(now_s)
        assert not trust.lost(now_s, -ECONNRESET)
        assert trust.is_excused == excused
        trust.withdraw(2)  # the one that ends first is used first: this is no other's
    trust.recovered(4.0)
    assert trust.lost(4.0, -ECONNRESET)


def test_connections_that_held_were_no_flapping() -> None:
    """Also where they were not lost but exchanged, for those by RDMA."""
    trust = Trust(TrustConfig(flap_s=5.0, flaps_max=2))
    for now_s in range(0, 1000, 100):
        trust.recovered(float(now_s))  # by RDMA
        assert not trust.lost(now_s + 1.0, -ECONNRESET)
        trust.recovered(now_s + 2.0)  # by TCP, for long


def test_refusals_count_for_a_while() -> None:
    trust = Trust(TrustConfig(refusals_max=3, refusal_s=60.0))
    assert not trust.refused(0.0)
    assert not trust.refused(50.0)
    assert not trust.refused(70.0)  # the first is forgotten
    assert trust.refused(80.0)


def test_bad_pages_end_it_once() -> None:
    trust = Trust(TrustConfig(bad_pages_max=3))
    assert [bool(trust.bad_page()) for _ in range(5)] == [False, False, True, False, False]
    trust.given_up()
    assert [bool(trust.bad_page()) for _ in range(3)] == [False, False, True]


def test_distrust_lasts_longer_each_time_and_is_forgiven() -> None:
    config = BackoffConfig(distrust_s=10.0, distrust_s_max=100.0)
    book: DonorBook[str] = DonorBook(config)
    now_s = 0.0
    for wait_s in (10.0, 20.0, 40.0, 80.0, 100.0, 100.0):
        assert book.distrusted("liar", now_s) == wait_s
        # Nothing that happens meanwhile shortens it.
        book.full("liar", now_s)
        book.unreachable("liar", now_s)
        assert not book.eligible(["liar"], now_s + wait_s - 1)
        now_s += wait_s
        assert book.eligible(["liar"], now_s)
        book.good("liar")
    assert book.distrusted("liar", now_s + 101.0) == 10.0


def test_a_donor_that_is_no_longer_configured_is_forgotten() -> None:
    book: DonorBook[str] = DonorBook()
    book.distrusted("liar", 0.0)
    book.forget("liar")
    assert book.eligible(["liar"], 0.0)
    assert book.distrusted("liar", 0.0) == BackoffConfig().distrust_s


def test_sessions_that_it_breaks_again_and_again_are_enough() -> None:
    trust = Trust(TrustConfig(sessions_max=3, session_s=60.0))
    for now_s in (0.0, 50.0, 70.0, 120.0):  # never three within a minute
        assert not trust.session_broken(now_s)
    assert "control sessions" in trust.session_broken(125.0)
    trust.given_up()
    assert not trust.session_broken(126.0)


def test_a_donor_with_the_only_copies_gets_its_next_session_later_and_later() -> None:
    trust = Trust(TrustConfig(session_s=60.0, session_pause_s_max=30.0))
    assert trust.session_pause_s(0.0) == 0.0
    pauses = []
    for _ in range(100):
        trust.session_broken(10.0)
        pauses.append(trust.session_pause_s(10.0))
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert max(pauses) == 30.0
    assert trust.session_pause_s(71.0) == 0.0
