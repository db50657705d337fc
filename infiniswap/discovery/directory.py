# SPDX-License-Identifier: Apache-2.0
"""The announced donors, as a consumer knows them from a broker's messages. Bounded.

Pure: the clock is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from infiniswap.control.messages import VERSIONS, choose_version
from infiniswap.discovery.announcement import (
    CLOCK_S_MAX,
    LIVES,
    Announcement,
    NotOursError,
    Withdrawal,
    check_age,
    decode,
)
from infiniswap.peers import PEERS_MAX
from infiniswap.units import HostPort, format_size

_CLOCK_S_TOLD: Final = 30.0
"""By how much a clock may differ before somebody is told."""


@dataclass(slots=True)
class _Entry:
    announcement: Announcement
    heard_s: float
    clock_s: float
    """By how much the donor's clock is behind ours; 0: as far as known it is not."""


class Directory:
    """The donors that a broker announces.

    Args:
        cluster: name of ours.
        secrets: announcement keys that are accepted; empty: announcements need no proof. Then they,
            and withdrawals, are hints that nobody has signed.
        slab_bytes: of the device that asks; None: any.
        loopback_ok: whether a loopback address may be meant for us.
        hosts_max: kept at once; more are ignored.

    Attributes:
        ignored: messages that did not count, by reason (infiniswap.discovery.announcement.REASONS).
    """

    def __init__(
        self,
        cluster: str,
        secrets: Sequence[bytes],
        *,
        slab_bytes: int | None = None,
        loopback_ok: bool = False,
        hosts_max: int = PEERS_MAX,
    ) -> None:
        self.ignored: Counter[str] = Counter()
        self._cluster = cluster
        self._secrets = tuple(secrets)
        self._slab_bytes = slab_bytes
        self._loopback_ok = loopback_ok
        self._hosts_max = hosts_max
        self._entries: dict[str, _Entry] = {}
        # What was heard last of a donor at an address; and sessions that have ended. Both bounded:
        # what is forgotten and recorded is refused for its age.
        self._sequences: dict[tuple[str, str], int] = {}
        self._ended: dict[str, None] = {}

    def take(
        self, topic: str, payload: bytes, now_s: float, wall_s: float, *, is_kept: bool = False
    ) -> bool:
        """A message. A signed withdrawal withdraws what its topic said and, where nothing is
        signed, an empty message.

        Args:
            topic, payload: of the message.
            now_s: seconds, monotonic.
            wall_s: seconds since 1970.
            is_kept: it is no new one; the broker has kept it.

        Returns:
            Whether the donors have changed.

        Raises:
            NotOursError: it does not count. What its topic said before still does.
        """
        if not payload:
            return not self._secrets and self._entries.pop(topic, None) is not None
        try:
            found = decode(topic, payload, self._secrets, self._cluster)
            if isinstance(found, Withdrawal):
                return self._end(topic)
            if self._secrets:
                check_age(found, wall_s)
                if not self._is_later(topic, found):
                    return False
            self._check(topic, found)
        except NotOursError as error:
            self.ignored[error.reason] += 1
            raise
        before = self._entries.get(topic)
        if self._secrets:
            self._remember(found)
        self._entries[topic] = _Entry(found, now_s, _clock_s(found, wall_s, is_kept))
        return before is None or _said(before.announcement) != _said(found)

    def _end(self, topic: str) -> bool:
        if self._secrets:
            self._ended[topic] = None
            while len(self._ended) > self._hosts_max:
                del self._ended[next(iter(self._ended))]
        return self._entries.pop(topic, None) is not None

    def _is_later(self, topic: str, found: Announcement) -> bool:
        """False: it was heard before. A broker gives the last one again to whoever comes back."""
        if topic in self._ended:
            raise NotOursError(
                "sequence", "it is of a session that was withdrawn: somebody has kept it"
            )
        before = self._entries.get(topic)
        last = self._sequences.get((found.donor_id, found.addresses[0]), 0)
        if before is not None and found.sequence < before.announcement.sequence:
            raise NotOursError(
                "sequence",
                f"a later one of donor {found.name} was heard before: somebody has kept this one, "
                "or the clock of that host was set back",
            )
        # Of an earlier session at the same address, which has not been withdrawn.
        return found.sequence > last

    def _remember(self, found: Announcement) -> None:
        place = found.donor_id, found.addresses[0]
        self._sequences.pop(place, None)
        self._sequences[place] = found.sequence
        while len(self._sequences) > self._hosts_max:
            del self._sequences[next(iter(self._sequences))]

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
            if now_s - entry.heard_s > LIVES * entry.announcement.every_s
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

    def clocks(self) -> list[str]:
        """Donors whose clocks differ from this host's, in sentences. They are used."""
        return [
            f"the clock of donor {entry.announcement.name} ({entry.announcement.address}) is "
            f"{abs(entry.clock_s):.0f} s {'behind' if entry.clock_s > 0 else 'ahead of'} that of "
            f"this host; beyond {CLOCK_S_MAX:.0f} s its announcements do not count: set both clocks"
            for entry in self._entries.values()
            if entry.clock_s
        ]

    def conflicts(self) -> list[str]:
        """Identities that several daemons have, in sentences. All of them are used."""
        by_id: dict[str, dict[HostPort, str]] = {}
        for donor in self.donors():
            by_id.setdefault(donor.donor_id, {})[donor.address] = donor.name
        return [
            conflict(donor_id, list(known)) for donor_id, known in by_id.items() if len(known) > 1
        ]


def _said(found: Announcement) -> Announcement:
    """Without what each repetition changes."""
    return structs.replace(found, time_s=0.0, sequence=0)


def _clock_s(found: Announcement, wall_s: float, is_kept: bool) -> float:
    if not found.time_s:  # it does not say
        return 0.0
    behind_s = wall_s - found.time_s
    is_told = behind_s < -_CLOCK_S_TOLD or (not is_kept and behind_s > _CLOCK_S_TOLD)
    return behind_s if is_told else 0.0


def conflict(donor_id: str, addresses: list[HostPort]) -> str:
    """The sentence about several daemons with one identity."""
    return (
        f"{len(addresses)} daemons have one identity ({donor_id}): "
        + ", ".join(sorted(map(str, addresses)))
        + ". Hosts that were cloned have one /etc/machine-id and name: on all but one of them "
        "run `rm /etc/machine-id && systemd-machine-id-setup` and restart the daemon"
    )
