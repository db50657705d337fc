# SPDX-License-Identifier: Apache-2.0
"""The donors that a device knows: which may be asked for memory now, and which has which slab."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from infiniswap import events
from infiniswap.device.donors.link import DonorLink
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.engine.protocol import Engine
from infiniswap.errors import InfiniswapError
from infiniswap.policy.donor_backoff import DonorBackoff
from infiniswap.units import HostPort

_REMOTES_MAX = 64  # of an engine (EngineConfig)


class KnownDonors:
    """A part of the mapper. Everything runs on the event loop.

    Args:
        engine: knows where each slab is.
        alarms: of the device.
        wake: set when there is a new donor.

    Attributes:
        links: one to each donor.
        backoff: which of them are not asked for a while.
        searches: slabs for which a donor is being found. As long as there are any, no donor is
            forgotten, because it may be asked next.
    """

    def __init__(self, engine: Engine, alarms: Alarms, wake: asyncio.Event) -> None:
        self.links: list[DonorLink] = []
        self.backoff: DonorBackoff[DonorLink] = DonorBackoff()
        self.searches: set[int] = set()
        self._engine = engine
        self._alarms = alarms
        self._wake = wake

    def know(self, donors: Iterable[HostPort], make_link: Callable[[HostPort], DonorLink]) -> None:
        """Says which donors exist now. One that is no longer among them keeps its slabs, gets no
        others, and is forgotten when the last slab has left it.

        Args:
            donors: all of them.
            make_link: for one that is new.
        """
        listed = dict.fromkeys(donors)
        known = {link.address for link in self.links}
        for link in self.links:
            link.is_listed = link.address in listed
        new = [make_link(donor) for donor in listed if donor not in known]
        self.links += new
        self.forget()
        if new:
            self._wake.set()

    def forget(self) -> None:
        """Those that are not listed any longer and have no slab, session or lease of the device."""
        if self.searches:
            return
        for link in [link for link in self.links if not link.is_listed and link.is_idle]:
            self.links.remove(link)
            self.backoff.forget(link)
            self._alarms.pop(_alarm(link), None)

    def usable(self) -> list[DonorLink]:
        """Those that may be asked for memory."""
        # An engine has so many places for donors; one that has a place can take more slabs.
        is_full = sum(link.remote is not None for link in self.links) >= _REMOTES_MAX
        return [
            link
            for link in self.links
            if link.is_listed and link.is_usable and (link.remote is not None or not is_full)
        ]

    def at(self, remote: int | None, slab: int) -> DonorLink | None:
        """The donor behind that remote, if it has the slab."""
        return next(
            (link for link in self.links if link.remote == remote and slab in link.mapped), None
        )

    def of(self, slab: int) -> DonorLink | None:
        """The donor that has a slab; for a slab that migrates, the donor to which it goes."""
        return self.at(self._engine.slab(slab).remote, slab)

    def took(self, link: DonorLink) -> None:
        """A donor has taken a slab on: its earlier faults are forgiven."""
        self._alarms.pop(_alarm(link), None)

    def unreachable(self, link: DonorLink, error: InfiniswapError, asked_s: float) -> None:
        """A donor could not be asked: it is left alone for a while."""
        link.detail = str(error)
        self.backoff.unreachable(link, asked_s)

    def distrusted(self, link: DonorLink, why: str) -> None:
        """A donor is given up for its faults (infiniswap.policy.donor_faults)."""
        wait_s = self.backoff.distrusted(link, asyncio.get_running_loop().time())
        sentence = f"donor {link.address} was given up for {wait_s:.0f} s: {why}"
        self._alarms.sound(_alarm(link), sentence, events.DONOR_DISTRUSTED, donor=link.address)

    def avoided(self, link: DonorLink, why: str) -> None:
        """A donor gets no further slabs for its faults, and keeps those that it has."""
        wait_s = self.backoff.distrusted(link, asyncio.get_running_loop().time())
        sentence = (
            f"donor {link.address} gets no further slabs for {wait_s:.0f} s: {why}. It keeps those "
            "that it has, as there is no backup"
        )
        self._alarms.sound(_alarm(link), sentence, events.DONOR_DISTRUSTED, donor=link.address)


def _alarm(link: DonorLink) -> str:
    return f"donor {link.address}"
