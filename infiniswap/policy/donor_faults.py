# SPDX-License-Identifier: Apache-2.0
"""What a donor that answers is given up for: bad pages, lies, refusals, losses again and again.

The paper does not have this: its donors are honest.

No single fault proves anything but one: a reply that breaks the protocol. Everything else happens
to good donors too (a connection breaks, a host is slow, a slab is taken back by force), and counts
only when it comes again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from errno import EPROTO


@dataclass(frozen=True, slots=True)
class FaultLimits:
    """How much a device bears before it gives a donor up.

    Attributes:
        flap_s: connections lost within this time of their recovery were none.
        flaps_max: of these in a row are too many.
        refusals_max: slabs refused within `refusal_s` that are too many.
        refusal_s: how long a refusal counts, in seconds.
        announced_s: how long after its time a loss that was announced may come.
        announced_s_max: the longest announcement.
        sessions_max: control sessions that it broke or flooded within `session_s`, in seconds, that
            are too many.
        session_pause_s_max: longest pause before it gets another one after that.
        bad_pages_max: pages with other bytes than were written, until the donor is given up.
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
    """What one donor has done. Methods return why it must be given up now; empty: it need not be.

    Args:
        config: how much is borne.
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
        """Since the donor was last given up."""
        return self._bad_pages

    @property
    def is_excused(self) -> bool:
        """Whether the last loss was one that had been announced."""
        return self._is_excused

    def given_up(self) -> None:
        """From now on it is a donor like any other."""
        self._recovered_s = None
        self._flaps = self._bad_pages = 0
        self._refusals_s.clear()
        self._sessions_s.clear()
        self._announced_s.clear()

    def recovered(self, now_s: float) -> None:
        """Its connections were lost and are back."""
        # What was replaced in good order, and long after, was no flapping.
        if self._recovered_s is not None and now_s - self._recovered_s > self._config.flap_s:
            self._flaps = 0
        self._recovered_s = now_s

    def announce(self, why: int, now_s: float, in_s: float) -> None:
        """It says in good order that it may cut the connections until then; `why` tells it from
        others. A slab that is taken back by force costs them, and a donor has the right to that:
        once for each.
        """
        self._forget_announced(now_s)
        self._announced_s[why] = now_s + min(in_s, self._config.announced_s_max)

    def withdraw(self, why: int) -> None:
        """That reason has ended."""
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
        """What it said in a control session broke the protocol, or was too much."""
        self._sessions_s = [*self._recent_s(now_s), now_s][-16:]
        too_many = len(self._sessions_s) >= self._config.sessions_max
        return "it breaks or floods its control sessions" if too_many else ""

    def session_pause_s(self, now_s: float) -> float:
        """How long to go without a session with it, for a donor that is not given up: each one
        costs us what it says."""
        recent = len(self._recent_s(now_s))
        return min(2.0**recent / 2, self._config.session_pause_s_max) if recent else 0.0

    def _recent_s(self, now_s: float) -> list[float]:
        return [then for then in self._sessions_s if now_s - then <= self._config.session_s]

    def bad_page(self) -> str:
        """A page came back with other bytes."""
        self._bad_pages += 1
        too_many = self._bad_pages == self._config.bad_pages_max
        return f"{self._bad_pages} pages came back with other bytes" if too_many else ""
