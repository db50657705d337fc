# SPDX-License-Identifier: Apache-2.0
"""Who has a place at a port: connections that have proved themselves, and those that have not yet.
Pure: the clock is passed in.

An address proves nothing: an attacker may share that of an honest host, and may have many. So no
connection without a proof keeps another one out. It holds its place until others need it, and the
longest waiting one goes first; whoever proves itself at once is never the one. Strangers, at
addresses without a proof in the last hour, share a part of the places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)

PROOF_S: Final = 2.0
"""How long a connection may take to prove itself."""
KNOWN_S: Final = 3600.0
"""An address counts as known for this long after it proved itself."""
STRANGERS_PART: Final = 2
"""Strangers share the places divided by this number."""
_KNOWN_MAX: Final = 1024


class ConnectionPlaces(Generic[Connection]):
    """The places of one port.

    Args:
        places_max: of all.
        per_host_max: connections of one peer (infiniswap.control.peer) that have proved
            themselves, and as many that have not.
        trusted: peers that count as known without a proof.
    """

    def __init__(
        self, places_max: int, per_host_max: int, trusted: frozenset[str] = frozenset()
    ) -> None:
        self._trusted = trusted
        self._max = places_max
        self._per_host_max = per_host_max
        self._strangers_max = max(1, places_max // STRANGERS_PART)
        self._peers: dict[Connection, str] = {}
        self._waiting: dict[str, dict[Connection, None]] = {}  # by peer; the first came first
        self._unproved: dict[Connection, None] = {}
        self._strangers: dict[Connection, None] = {}
        self._proved: Counter[str] = Counter()
        self._known_s: dict[str, float] = {}  # by peer: the latest proof, the oldest first

    def __len__(self) -> int:
        return len(self._peers)

    def is_known(self, peer: str, now_s: float) -> bool:
        """Whether that peer is trusted, has proved itself in the last hour, or is connected and
        has."""
        if peer in self._trusted:
            return True
        proved_s = self._known_s.get(peer, float("-inf"))
        return now_s - proved_s < KNOWN_S or self._proved[peer] > 0

    def enter(
        self, peer: str, connection: Connection, now_s: float
    ) -> tuple[bool, list[Connection]]:
        """A connection has come; `leave` must follow if it is let in.

        Returns:
            Whether it is let in; and the one that has lost its place for it, if any.
        """
        if self._proved[peer] >= self._per_host_max or self._proved.total() >= self._max:
            return False, []
        is_known = self.is_known(peer, now_s)
        losers: Iterable[Connection] = ()
        if len(self._waiting.get(peer, ())) >= self._per_host_max:
            losers = self._waiting[peer]
        elif not is_known and len(self._strangers) >= self._strangers_max:
            losers = self._strangers
        elif len(self) >= self._max:
            losers = self._strangers or (self._unproved if is_known else ())
            if not losers:
                return False, []
        lost = [next(iter(losers))] if losers else []
        for loser in lost:
            self.leave(loser)
        self._peers[connection] = peer
        self._waiting.setdefault(peer, {})[connection] = None
        self._unproved[connection] = None
        if not is_known:
            self._strangers[connection] = None
        return True, lost

    def proved(self, connection: Connection, now_s: float) -> None:
        """A connection has proved itself. Any number of times; not after it has lost its place."""
        peer = self._peers.get(connection)
        if peer is None:
            return
        self._known_s.pop(peer, None)
        self._known_s[peer] = now_s
        if len(self._known_s) > _KNOWN_MAX:
            del self._known_s[next(iter(self._known_s))]
        if connection in self._unproved:
            self._forget(connection, peer)
            self._proved[peer] += 1

    def leave(self, connection: Connection) -> None:
        """The connection is gone. Idempotent."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        if connection in self._unproved:
            self._forget(connection, peer)
            return
        self._proved[peer] -= 1
        if not self._proved[peer]:
            del self._proved[peer]

    def _forget(self, connection: Connection, peer: str) -> None:
        """It no longer waits."""
        del self._unproved[connection]
        self._strangers.pop(connection, None)
        waiting = self._waiting[peer]
        del waiting[connection]
        if not waiting:
            del self._waiting[peer]
