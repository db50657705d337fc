# SPDX-License-Identifier: Apache-2.0
"""Faults for which a donor that answers is given up: bad pages, lies, refusals, repeated losses.

The paper does not have this: its donors are honest.

Only one kind of fault proves something at once: a reply that breaks the protocol. All others happen
to good donors too (a connection breaks, a host is slow, a slab is taken back by force), and count
only when they repeat.

Who changes bits on the way to a donor makes a good donor look like a bad one. So a donor is given
up for bad pages only where every page has another copy, in the backup. Without a backup its slabs
stay, and it gets no further ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from errno import EPROTO


@dataclass(frozen=True, slots=True)
class FaultLimits:
    """How much a device bears before it gives a donor up.

    Attributes:
        flap_s: a recovery whose connections are lost within this time is a flap.
        flaps_max: so many flaps in a row are too many.
        refusals_max: so many slabs refused within `refusal_s` are too many.
        refusal_s: how long a refusal counts, in seconds.
        announced_s: how much later than announced a loss may come.
        announced_s_max: the longest announcement that counts.
        sessions_max: so many control sessions that it broke or flooded within `session_s` (seconds)
            are too many.
        session_pause_s_max: longest pause after that before it gets another session.
        bad_pages_max: so many pages with other bytes than were written are too many.
    """

    flap_s: float = 5.0
    flaps_max: int = 3
    refusals_max: int = 4
    refusal_s: float = 60.0
    announced_s: float = 5.0
    announced_s_max: float = 60.0
    sessions_max: int = 3
    session_s: float = 60.0
    session_pause_s_max: float = 30.0
    bad_pages_max: int = 16


class DonorFaults:
    """The faults of one donor. Methods return why it must be given up now; empty: it need not be.

    Args:
        config: how much the device bears.
    """

    def __init__(self, config: FaultLimits | None = None) -> None:
        self._config = config or FaultLimits()
        self._recovered_s: float | None = None
        self._flaps = 0
        self._refusals_s: list[float] = []
        self._sessions_s: list[float] = []
        self._bad_pages = 0
        self._announced_s: dict[int, float] = {}
        self._is_excused = False

    @property
    def bad_pages(self) -> int:
        """Bad pages since the donor was last given up, or kept all the same."""
        return self._bad_pages

    @property
    def is_excused(self) -> bool:
        """Whether the last loss had been announced."""
        return self._is_excused

    def given_up(self) -> None:
        """The donor was given up; from now on it is a donor like any other."""
        self._recovered_s = None
        self._flaps = self._bad_pages = 0
        self._refusals_s.clear()
        self._sessions_s.clear()
        self._announced_s.clear()

    def kept(self) -> None:
        """It was to be given up for bad pages and is not, as it has the only copies: they are
        counted anew."""
        self._bad_pages = 0

    def recovered(self, now_s: float) -> None:
        """Its connections were lost and are back."""
        # Connections that were lost long after their recovery did not flap.
        if self._recovered_s is not None and now_s - self._recovered_s > self._config.flap_s:
            self._flaps = 0
        self._recovered_s = now_s

    def announce(self, why: int, now_s: float, in_s: float) -> None:
        """The donor announces that it may cut the connections until then; `why` identifies the
        announcement. Taking a slab back by force breaks the connections, and a donor may do that:
        one loss for each announcement.
        """
        self._forget_announced(now_s)
        self._announced_s[why] = now_s + min(in_s, self._config.announced_s_max)

    def withdraw(self, why: int) -> None:
        """The reason of that announcement has ended."""
        self._announced_s.pop(why, None)

    def _forget_announced(self, now_s: float) -> None:
        late_s = self._config.announced_s
        self._announced_s = {
            why: when_s for why, when_s in self._announced_s.items() if now_s <= when_s + late_s
        }

    def lost(self, now_s: float, code: int) -> str:
        """Its connections are lost; `code` is the negative errno of why."""
        self._is_excused = False
        if code == -EPROTO:
            return "its replies break the protocol"
        self._forget_announced(now_s)
        if self._announced_s:
            del self._announced_s[min(self._announced_s, key=self._announced_s.__getitem__)]
            self._is_excused = True
            return ""
        since_s = self._recovered_s
        if since_s is None or now_s - since_s > self._config.flap_s:
            self._flaps = 0
            return ""
        self._recovered_s = None
        self._flaps += 1
        return "it is lost again and again" if self._flaps >= self._config.flaps_max else ""

    def refused(self, now_s: float) -> str:
        """It refused requests for a slab that it had taken on."""
        config = self._config
        kept = [then for then in self._refusals_s if now_s - then <= config.refusal_s]
        self._refusals_s = [*kept, now_s][-config.refusals_max :]
        too_many = len(self._refusals_s) >= config.refusals_max
        return "it refuses what it has taken on" if too_many else ""

    def session_broken(self, now_s: float) -> str:
        """It broke the protocol in a control session, or flooded the session."""
        self._sessions_s = [*self._recent_s(now_s), now_s][-16:]
        too_many = len(self._sessions_s) >= self._config.sessions_max
        return "it breaks or floods its control sessions" if too_many else ""

    def session_pause_s(self, now_s: float) -> float:
        """How long to wait before another session with a donor that is not given up: every session
        costs us time for its messages."""
        recent = len(self._recent_s(now_s))
        return min(2.0**recent / 2, self._config.session_pause_s_max) if recent else 0.0

    def _recent_s(self, now_s: float) -> list[float]:
        return [then for then in self._sessions_s if now_s - then <= self._config.session_s]

    def bad_page(self) -> str:
        """A page came back with other bytes."""
        self._bad_pages += 1
        too_many = self._bad_pages == self._config.bad_pages_max
        return f"{self._bad_pages} pages came back with other bytes" if too_many else ""
