# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.donor_faults: what a donor is given up for."""

from __future__ import annotations

from errno import ECONNRESET, EPROTO, ETIMEDOUT

import pytest

from infiniswap.policy.donor_faults import DonorFaults, FaultLimits


def test_a_broken_protocol_is_enough() -> None:
    assert "protocol" in DonorFaults().lost(0.0, -EPROTO)


@pytest.mark.parametrize("code", [-ECONNRESET, -ETIMEDOUT])
def test_connections_lost_right_after_each_recovery_count(code: int) -> None:
    faults = DonorFaults(FaultLimits(flap_s=5.0, flaps_max=3))
    assert not faults.lost(0.0, code)
    for now_s in (1.0, 3.0):
        faults.recovered(now_s)
        assert not faults.lost(now_s + 1.0, code)
    faults.recovered(5.0)
    assert faults.lost(6.0, code)


def test_a_loss_now_and_then_does_not() -> None:
    faults = DonorFaults(FaultLimits(flap_s=5.0, flaps_max=2))
    for now_s in range(0, 1000, 10):
        assert not faults.lost(float(now_s), -ECONNRESET)
        faults.recovered(now_s + 1.0)


def test_one_loss_counts_once() -> None:
    faults = DonorFaults(FaultLimits(flap_s=5.0, flaps_max=2))
    faults.recovered(0.0)
    for _ in range(10):
        assert not faults.lost(1.0, -ECONNRESET)


def test_losses_that_were_announced_do_not_count() -> None:
    """A slab taken by force costs the connections, however many are in a row."""
    faults = DonorFaults(
        FaultLimits(flap_s=5.0, flaps_max=2, announced_s=5.0, announced_s_max=60.0)
    )
    now_s = 0.0
    for generation in range(10):
        faults.recovered(now_s)
        faults.announce(generation, now_s, 1.0)
        now_s += 2.0
        assert not faults.lost(now_s, -ECONNRESET)
        assert faults.is_excused
    # What lies excuses nothing, and no announcement lasts for ever.
    faults.announce(98, now_s, 1.0)
    assert faults.lost(now_s, -EPROTO)
    assert not faults.is_excused
    faults.announce(99, now_s, 1e9)
    assert not faults.lost(now_s + 66.0, -ECONNRESET)
    assert not faults.is_excused
    # Nor one that was done with in time.
    faults.announce(100, now_s, 10.0)
    faults.withdraw(100)
    faults.recovered(now_s + 20.0)
    assert not faults.lost(now_s + 21.0, -ECONNRESET)
    faults.recovered(now_s + 22.0)
    assert faults.lost(now_s + 23.0, -ECONNRESET)


def test_one_announcement_excuses_one_loss() -> None:
    faults = DonorFaults(FaultLimits(flap_s=5.0, flaps_max=2))
    faults.announce(1, 0.0, 30.0)
    faults.announce(2, 0.0, 10.0)
    for now_s, excused in ((1.0, True), (2.0, True), (3.0, False)):
        faults.recovered(now_s)
        assert not faults.lost(now_s, -ECONNRESET)
        assert faults.is_excused == excused
        faults.withdraw(2)  # the one that ends first is used first: this is no other's
    faults.recovered(4.0)
    assert faults.lost(4.0, -ECONNRESET)


def test_connections_that_held_were_no_flapping() -> None:
    """Also where they were not lost but exchanged, for those by RDMA."""
    faults = DonorFaults(FaultLimits(flap_s=5.0, flaps_max=2))
    for now_s in range(0, 1000, 100):
        faults.recovered(float(now_s))  # by RDMA
        assert not faults.lost(now_s + 1.0, -ECONNRESET)
        faults.recovered(now_s + 2.0)  # by TCP, for long


def test_refusals_count_for_a_while() -> None:
    faults = DonorFaults(FaultLimits(refusals_max=3, refusal_s=60.0))
    assert not faults.refused(0.0)
    assert not faults.refused(50.0)
    assert not faults.refused(70.0)  # the first is forgotten
    assert faults.refused(80.0)


def test_bad_pages_end_it_once() -> None:
    faults = DonorFaults(FaultLimits(bad_pages_max=3))
    assert [bool(faults.bad_page()) for _ in range(5)] == [False, False, True, False, False]
    faults.given_up()
    assert [bool(faults.bad_page()) for _ in range(3)] == [False, False, True]


def test_a_donor_that_was_kept_in_spite_of_bad_pages_is_judged_again() -> None:
    faults = DonorFaults(FaultLimits(bad_pages_max=3))
    for _ in range(3):
        assert [bool(faults.bad_page()) for _ in range(3)] == [False, False, True]
        faults.kept()
        assert faults.bad_pages == 0


def test_sessions_that_it_breaks_again_and_again_are_enough() -> None:
    faults = DonorFaults(FaultLimits(sessions_max=3, session_s=60.0))
    for now_s in (0.0, 50.0, 70.0, 120.0):  # never three within a minute
        assert not faults.session_broken(now_s)
    assert "control sessions" in faults.session_broken(125.0)
    faults.given_up()
    assert not faults.session_broken(126.0)


def test_a_donor_with_the_only_copies_gets_its_next_session_later_and_later() -> None:
    faults = DonorFaults(FaultLimits(session_s=60.0, session_pause_s_max=30.0))
    assert faults.session_pause_s(0.0) == 0.0
    pauses = []
    for _ in range(100):
        faults.session_broken(10.0)
        pauses.append(faults.session_pause_s(10.0))
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert max(pauses) == 30.0
    assert faults.session_pause_s(71.0) == 0.0
