# SPDX-License-Identifier: Apache-2.0
"""Links that let one browser in, once, and the sessions that they begin. Pure: clock and randomness
are passed in.

A link is 128 random bits behind the # of an address, which browsers send to nobody; the page sends
it over its WebSocket and gets a session's token in exchange. That opens further WebSockets of the
same tab, until it is not used for a while or the daemon ends. Digests are kept, not tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

LINK_S: Final = 300
"""How long a link is good."""
SESSION_S: Final = 12 * 3600
"""How long a session lives after its last use."""
LINKS_MAX: Final = 64
SESSIONS_MAX: Final = 64
"""At once; beyond it the oldest is forgotten."""
TOKEN_BYTES: Final = 16
TOKEN_LENGTH: Final = 2 * TOKEN_BYTES
"""Characters."""


class Links:
    """Those of one daemon.

    Args:
        clock: seconds, monotonic.
        random: makes that many random bytes, which nobody can guess.
    """

    def __init__(self, clock: Callable[[], float], random: Callable[[int], bytes]) -> None:
        self._clock = clock
        self._random = random
        self._links: dict[bytes, float] = {}
        self._sessions: dict[bytes, float] = {}

    def make(self) -> str:
        """A new link."""
        return self._add(self._links, LINK_S, LINKS_MAX)

    def begin(self, link: str) -> str:
        """Exchanges a link for a session; empty: the link is not good, or not any longer."""
        until_s = self._links.pop(_digest(link), None)
        if until_s is None or self._clock() > until_s:
            return ""
        return self._add(self._sessions, SESSION_S, SESSIONS_MAX)

    def resume(self, session: str) -> bool:
        """Whether a session goes on."""
        digest = _digest(session)
        until_s = self._sessions.pop(digest, None)
        if until_s is None or self._clock() > until_s:
            return False
        self._sessions[digest] = self._clock() + SESSION_S  # the last one now
        return True

    def _add(self, kept: dict[bytes, float], good_s: float, most: int) -> str:
        token = self._random(TOKEN_BYTES).hex()
        kept[_digest(token)] = self._clock() + good_s
        if len(kept) > most:
            del kept[next(iter(kept))]
        return token


def _digest(token: str) -> bytes:
    # What is looked up is a digest: the time that takes says nothing of a token.
    return hashlib.sha256(token.encode(errors="replace")).digest()
