# SPDX-License-Identifier: Apache-2.0
"""When a donor that answers is given up all the same. Not in the paper, whose donors are honest.

No single fault proves anything but one: a reply that breaks the protocol. Everything else happens
to good donors too (a connection breaks, a host is slow, a slab is taken back by force), and counts
only when it comes again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from errno import EPROTO


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """How much is borne.

    Attributes:
        flap_s: connections lost within this time of their recovery were none.
        flaps_max: of these in a row are too many.
        refusals_max: slabs refused within `refusal_s` that are too many.
        refusal_s: how long a refusal counts, in seconds.
        bad_pages_max: pages with other bytes than were written, until the donor is given up.
    """

    flap_s: float = 5.0
    flaps_max: int = 3
    refusals_max: int = 4
    refusal_s: float = 60.0
    bad_pages_max: int = 16


class Trust:
    """What one donor has done. Methods return why it must be given up now; empty: it need not be.

    Args:
        config: how much is borne.
    """

    def __init__(self, config: TrustConfig | None = None) -> None:
        self._config = config or TrustConfig()
        self._recovered_s: float | None = None
        self._flaps = 0
        self._refusals_s: list[float] = []
        self._bad_pages = 0

    @property
    def bad_pages(self) -> int:
        """Since the donor was last given up."""
        return self._bad_pages

    def given_up(self) -> None:
        """From now on it is a donor like any other."""
        self._recovered_s = None
        self._flaps = self._bad_pages = 0
        self._refusals_s.clear()

    def recovered(self, now_s: float) -> None:
        """Its connections were lost and are back."""
        self._recovered_s = now_s

    def lost(self, now_s: float, code: int) -> str:
        """Its connections are lost; `code` is the negative errno of why."""
        if code == -EPROTO:
            return "its replies break the protocol"
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

    def bad_page(self) -> str:
        """A page came back with other bytes."""
        self._bad_pages += 1
        too_many = self._bad_pages == self._config.bad_pages_max
        return f"{self._bad_pages} pages came back with other bytes" if too_many else ""
