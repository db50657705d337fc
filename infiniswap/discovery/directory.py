# SPDX-License-Identifier: Apache-2.0
"""The announced donors, as a consumer knows them from a broker's messages. Bounded.

Pure: the clock is passed in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from infiniswap.control.messages import VERSIONS, choose_version
from infiniswap.discovery.announcement import Announcement, NotOursError, decode
from infiniswap.peers import PEERS_MAX
from infiniswap.units import HostPort, format_size

_LIVES: Final = 3.0
"""Times `every_s` after which a silent donor counts as gone."""


@dataclass(slots=True)
class _Entry:
    announcement: Announcement
    heard_s: float


class Directory:
    """The donors that a broker announces.

    Args:
        cluster: name of ours.
        secret: of the cluster; None: announcements need no proof.
        slab_bytes: of the device that asks; None: any.
        loopback_ok: whether a loopback address may be meant for us.
        hosts_max: kept at once; more are ignored.

    Attributes:
        ignored: messages that did not count, by reason (infiniswap.discovery.announcement.REASONS).
    """

    def __init__(
        self,
        cluster: str,
        secret: bytes | None,
        *,
        slab_bytes: int | None = None,
        loopback_ok: bool = False,
        hosts_max: int = PEERS_MAX,
    ) -> None:
        self.ignored: Counter[str] = Counter()
        self._cluster = cluster
        self._secret = secret
        self._slab_bytes = slab_bytes
        self._loopback_ok = loopback_ok
        self._hosts_max = hosts_max
        self._entries: dict[str, _Entry] = {}

    def take(self, topic: str, payload: bytes, now_s: float) -> bool:
        """A message; an empty one withdraws what its topic said.

        Returns:
            Whether the donors have changed.

        Raises:
            NotOursError: it does not count. What its topic said before still does.
        """
        if not payload:
            return self._entries.pop(topic, None) is not None
        try:
            found = decode(topic, payload, self._secret, self._cluster)
            self._check(topic, found)
        except NotOursError as error:
            self.ignored[error.reason] += 1
            raise
        before = self._entries.get(topic)
        self._entries[topic] = _Entry(found, now_s)
        return before is None or before.announcement != found

    def _check(self, topic: str, found: Announcement) -> None:
        who = f"donor {found.name} ({found.address})"
        if choose_version(VERSIONS, found.protocols) is None:
            raise NotOursError(
                "protocol",
                f"{who} (release {found.software}) speaks none of the versions of the control API "
                "that are spoken here: upgrade one of the two",
            )
        if self._slab_bytes not in (None, found.slab_bytes):
            raise NotOursError(
                "slab",
                f"{who} lends slabs of {format_size(found.slab_bytes)}, and this device has slabs "
                f"of {format_size(self._slab_bytes or 0)}",
            )
        if found.address.is_loopback and not self._loopback_ok:
            raise NotOursError(
                "loopback",
                f"{who} announces a loopback address, which only its own host can reach: set "
                "daemon.listen or mqtt.advertise there",
            )
        if topic not in self._entries and len(self._entries) >= self._hosts_max:
            raise NotOursError(
                "bound", f"{self._hosts_max} donors are known, and more are not kept in mind"
            )

    def connected(self, now_s: float) -> None:
        """The broker is there (again): known donors have the usual time to be heard from now on."""
        for entry in self._entries.values():
            entry.heard_s = now_s

    def expire(self, now_s: float) -> bool:
        """Forgets donors that were not heard for long; returns whether there were any. Not to be
        called without a broker, as nobody can be heard then."""
        gone = [
            topic
            for topic, entry in self._entries.items()
            if now_s - entry.heard_s > _LIVES * entry.announcement.every_s
        ]
        for topic in gone:
            del self._entries[topic]
        return bool(gone)

    def donors(self) -> tuple[Announcement, ...]:
        """Every announced donor, in the order of arrival."""
        return tuple(entry.announcement for entry in self._entries.values())

    def addresses(self) -> tuple[HostPort, ...]:
        """Addresses to ask them at, each once."""
        return tuple(dict.fromkeys(donor.address for donor in self.donors()))

    def conflicts(self) -> list[str]:
        """Identities that several daemons have, in sentences. All of them are used."""
        by_id: dict[str, dict[HostPort, str]] = {}
        for donor in self.donors():
            by_id.setdefault(donor.donor_id, {})[donor.address] = donor.name
        return [
            conflict(donor_id, list(known)) for donor_id, known in by_id.items() if len(known) > 1
        ]


def conflict(donor_id: str, addresses: list[HostPort]) -> str:
    """The sentence about several daemons with one identity."""
    return (
        f"{len(addresses)} daemons have one identity ({donor_id}): "
        + ", ".join(sorted(map(str, addresses)))
        + ". Hosts that were cloned have one /etc/machine-id and name: on all but one of them "
        "run `rm /etc/machine-id && systemd-machine-id-setup` and restart the daemon"
    )
