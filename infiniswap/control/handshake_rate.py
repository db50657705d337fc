# SPDX-License-Identifier: Apache-2.0
"""How often peers may begin TLS: each handshake costs the donor about a millisecond of processor
time. Pure: the clock is passed in."""

from __future__ import annotations

from typing import Final

from infiniswap.control.rate import Rate, RateLimit

PER_HOST: Final = Rate(burst=64, per_s=20.0)
"""Of one peer. After a restart of a donor all devices of a host come back at the same time."""
OF_STRANGERS: Final = Rate(burst=256, per_s=100.0)
"""Rate for all peers together that have not proved themselves (infiniswap.control.places)."""
PEERS_MAX: Final = 1024


class HandshakeRates:
    """Limits of one port.

    Args:
        per_host: of one peer (see infiniswap.control.peer).
        of_strangers: of all peers together that have not proved themselves lately. So a flood from
            many addresses takes nothing from a host that has.
        peers_max: remembered at once; beyond it the one that was quiet longest is forgotten.
    """

    def __init__(
        self,
        per_host: Rate = PER_HOST,
        of_strangers: Rate = OF_STRANGERS,
        peers_max: int = PEERS_MAX,
    ) -> None:
        self._per_host = per_host
        self._strangers = RateLimit(of_strangers)
        self._peers_max = peers_max
        self._peers: dict[str, RateLimit] = {}

    def take(self, peer: str, now_s: float, *, is_stranger: bool) -> bool:
        """Whether this peer may begin a handshake now."""
        limit = self._peers.pop(peer, None) or RateLimit(self._per_host)
        self._peers[peer] = limit  # the last one now
        if len(self._peers) > self._peers_max:
            del self._peers[next(iter(self._peers))]
        return limit.take(now_s) and (not is_stranger or self._strangers.take(now_s))
