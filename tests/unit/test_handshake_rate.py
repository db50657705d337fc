# SPDX-License-Identifier: Apache-2.0
"""How often peers may begin TLS."""

from __future__ import annotations

from infiniswap.control.handshake_rate import HandshakeRates
from infiniswap.control.rate import Rate


def rates() -> HandshakeRates:
    return HandshakeRates(Rate(4, 2.0), Rate(10, 5.0), peers_max=100)


def taken(limits: HandshakeRates, peer: str, count: int, now_s: float, *, new: bool = True) -> int:
    return sum(limits.take(peer, now_s, is_stranger=new) for _ in range(count))


def test_a_peer_has_a_burst_and_then_a_pace() -> None:
    limits = rates()
    assert taken(limits, "a", 20, 0.0) == 4
    assert taken(limits, "a", 20, 1.0) == 2
    assert taken(limits, "b", 20, 1.0) == 4


def test_strangers_share_a_pace_and_who_is_connected_has_its_own() -> None:
    limits = rates()
    assert sum(taken(limits, f"stranger{n}", 1, 0.0) for n in range(90)) == 10
    assert taken(limits, "device", 20, 0.0, new=False) == 4
    assert sum(taken(limits, f"other{n}", 1, 1.0) for n in range(90)) == 5


def test_what_is_remembered_is_bounded() -> None:
    limits = rates()
    for number in range(1000):
        limits.take(f"p{number}", 0.0, is_stranger=False)
    assert len(limits._peers) == 100
