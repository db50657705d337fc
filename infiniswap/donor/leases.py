# SPDX-License-Identifier: Apache-2.0
"""The lease table: who may use which slots, and until when. No I/O, no clock.

                 session and connections gone
    ACTIVE  ────────────────────────────────────▶  GRACE  ── grace period over ──▶  EXPIRED
       ▲                                             │                                 │
       └── reclaimed by its device, or a data  ──────┘                          removed when its
           connection seen                                                      slabs are fenced

A lease lives while its session or a data connection does: a device process whose interpreter is
paused loses its session, but its C threads go on using the slabs. A connection without a session
keeps it for an hour at most (ALONE_S), because its peer may be no device at all. A lease belongs to
one session at a time; with its reclaim secret the same device may move it to a new one. An expired
lease never comes back.

Leases and their slots take memory here, so their number per session and per consumer (a host) is
limited.
"""

from __future__ import annotations

import enum
import hmac
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct, structs

from infiniswap.control import messages as m
from infiniswap.control.peer import consumer_of
from infiniswap.donor.traffic import Traffic
from infiniswap.errors import RequestRefusedError
from infiniswap.fields import SLOTS_MAX, U53, Hex128, Name, Uuid
from infiniswap.policy.quota import Tenant
from infiniswap.units import counted

ALONE_S: Final = 3600.0
"""How long data connections keep a lease that has no session. Not less: a paused interpreter must
not lose its pages."""

SESSION_LEASES_MAX: Final = 4
"""Leases of one session. A device needs one, and another one if it could not give that back."""

CONSUMER_SLOTS_MAX: Final = 8 * SLOTS_MAX
"""Slots in all leases of one consumer: 8 MiB in the store, and 128 TiB of slabs of 1 GiB."""


class LeaseState(enum.Enum):
    """Life of a lease; the values are those of LeaseStatus.state."""

    ACTIVE = "active"
    GRACE = "grace"
    EXPIRED = "expired"


class LeaseRecord(Struct, frozen=True, omit_defaults=True):
    """Whose lease it is, and how the device that reclaims it is recognised.

    It is also what a successor reads of it (infiniswap.donor.records), or a daemon of an earlier
    release: fields that it does not know are no reason to end a lease.

    Attributes:
        certified_host: the host that its certificate named; empty: without certificates.
        use: what it is for, as the device says.
        granted_unix_s: when it was granted, in Unix time; 0: by a daemon that did not note that.
        peer: whom the session's connection counted for (infiniswap.control.socket_owner); empty: by
            a daemon that did not note that, and its address counts.
    """

    lease: U53
    device_id: Uuid
    device_name: Name
    host_name: Name
    address: str
    slots_max: int
    reclaim: Hex128
    epoch: U53
    certified_host: str = ""
    use: m.LeaseUse = m.LeaseUse()
    granted_unix_s: float = 0.0
    peer: str = ""


@dataclass(slots=True)
class GrantedLease:
    """One lease, as the donor granted it. Changed by LeaseTable only."""

    record: LeaseRecord = field(repr=False)
    session: int | None
    state: LeaseState = LeaseState.ACTIVE
    connections: int = 0
    grace_until_s: float = 0.0
    alone_until_s: float = 0.0
    slots: dict[int, m.SlotInfo] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    lease: int = field(init=False)
    """Its number."""
    consumer: str = field(init=False)
    """That of the session that it was granted to."""

    def __post_init__(self) -> None:
        self.lease = self.record.lease
        record = self.record
        self.consumer = record.certified_host or record.peer or consumer_of(record.address)

    @property
    def tenant(self) -> Tenant[str]:
        """Whose share it counts against."""
        return self.consumer, self.record.use.tenant


class LeaseTable:
    """All leases of a donor.

    Args:
        grace_s: how long a lease without session and connections waits for its device.
        leases_max: beyond it no lease is granted.
        consumer_leases_max: likewise of one consumer; None: only the limit of all counts.
        alone_s: how long data connections alone keep a lease.
    """

    def __init__(
        self,
        grace_s: float,
        leases_max: int,
        consumer_leases_max: int | None = None,
        alone_s: float = ALONE_S,
    ) -> None:
        self._grace_s = grace_s
        self._leases_max = leases_max
        self._consumer_leases_max = consumer_leases_max or leases_max
        self._alone_s = alone_s
        self._leases: dict[int, GrantedLease] = {}
        self._sessions: set[int] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def leases(self) -> list[GrantedLease]:
        """Every lease, expired ones included, oldest first."""
        return list(self._leases.values())

    def get(self, lease: int) -> GrantedLease | None:
        """The lease of that number, whoever owns it."""
        return self._leases.get(lease)

    def session_opened(self, session: int) -> None:
        """A session may own leases from now on."""
        self._sessions.add(session)

    def session_closed(self, session: int, now_s: float) -> list[GrantedLease]:
        """A session ended; returns the leases it owned."""
        self._sessions.discard(session)
        owned = [lease for lease in self._leases.values() if lease.session == session]
        for lease in owned:
            lease.session = None
            lease.alone_until_s = now_s + self._alone_s
            self._settle(lease, now_s)
        return owned

    def is_left(self, lease: int) -> bool:
        """Whether no session has the lease."""
        entry = self._leases.get(lease)
        return entry is None or entry.session is None

    def check_room(self, session: int, consumer: str, slots_max: int) -> GrantedLease | None:
        """Looks whether a further lease of so many slots may be granted.

        Returns:
            A lease without a slab that has to end first: by it nobody's pages are lost. None: there
            is room.

        Raises:
            RequestRefusedError: there is none.
        """
        self._check_session(session)
        own = [entry for entry in self._leases.values() if entry.consumer == consumer]
        slots = sum(entry.record.slots_max for entry in own)
        if len(own) >= self._consumer_leases_max:
            full = f"{consumer} has {counted(len(own), 'lease')} here, the limit of one host"
        elif slots + slots_max > CONSUMER_SLOTS_MAX:
            full = (
                f"{consumer} has leases of {counted(slots, 'slab')} here and asks for {slots_max} "
                f"more; the limit of one host is {CONSUMER_SLOTS_MAX}"
            )
        elif len(self._leases) >= self._leases_max:
            own = list(self._leases.values())
            full = f"this donor has {counted(self._leases_max, 'lease')}, its limit"
        else:
            return None
        spare = _first_spare(own)
        if spare is None:
            raise _full(full)
        return spare

    def _check_session(self, session: int) -> None:
        if sum(entry.session == session for entry in self._leases.values()) >= SESSION_LEASES_MAX:
            raise _full(f"this session has {SESSION_LEASES_MAX} leases, its limit")

    def grant(self, record: LeaseRecord, session: int, now_s: float) -> GrantedLease:
        """Enters a new lease; in grace at once when its session ended meanwhile.

        Raises:
            ValueError: that number is taken.
        """
        if record.lease in self._leases:
            raise ValueError(f"lease {record.lease} exists")
        entry = GrantedLease(record, session if session in self._sessions else None)
        entry.alone_until_s = now_s + self._alone_s
        self._leases[record.lease] = entry
        self._settle(entry, now_s)
        return entry

    def restore(
        self, record: LeaseRecord, slots: Iterable[m.SlotInfo], now_s: float
    ) -> GrantedLease:
        """Enters a lease of the daemon's predecessor: its device has a whole grace period.

        Raises:
            ValueError: that number is taken.
        """
        entry = self.grant(record, 0, now_s)
        entry.slots = {slot.slot: slot for slot in slots}
        return entry

    def owned(self, lease: int, session: int) -> GrantedLease:
        """The lease, for a request of the session that owns it.

        Raises:
            RequestRefusedError: no such lease, or not of that session. Both look alike, so that
                nobody learns the numbers of other leases.
        """
        entry = self._leases.get(lease)
        if entry is None or entry.state is LeaseState.EXPIRED or entry.session != session:
            raise _unknown(lease)
        return entry

    def reclaim(
        self, lease: int, device_id: str, secret: str, epoch: int, session: int
    ) -> GrantedLease:
        """Moves a lease to a session of the same device; from now on it cannot expire.

        The caller then fences the old connections and reports the new epoch to `renewed`.

        Raises:
            RequestRefusedError: unknown lease, another device, wrong secret; or stale: a later
                epoch was granted to a session that is still open; or that session has as many
                leases as it may have.
        """
        entry = self._leases.get(lease)
        if (
            entry is None
            or entry.state is LeaseState.EXPIRED
            or entry.record.device_id != device_id
            or not hmac.compare_digest(entry.record.reclaim, secret)
            or session not in self._sessions
        ):
            raise _unknown(lease)
        if entry.session != session:
            self._check_session(session)
        # The answer to an earlier renewal may have been lost with its session: then the device
        # knows only an old epoch, which is not its fault.
        superseded = entry.session not in (None, session) and epoch != entry.record.epoch
        if superseded or epoch > entry.record.epoch:
            raise RequestRefusedError(
                f"lease {lease} is at epoch {entry.record.epoch}, not {epoch}",
                reason=m.REFUSED_STALE,
            )
        entry.session = session
        entry.state = LeaseState.ACTIVE
        return entry

    def renewed(self, lease: int, epoch: int, use: m.LeaseUse | None = None) -> None:
        """The old connections are fenced; the lease is at a new epoch. `use`: what it is for from
        now on; None: its device does not say, and it is what it was."""
        entry = self._leases[lease]
        entry.record = structs.replace(entry.record, epoch=epoch, use=use or entry.record.use)

    def mapped(self, lease: int, slot: m.SlotInfo) -> None:
        """A slab was put into a slot."""
        self._leases[lease].slots[slot.slot] = slot

    def unmapped(self, lease: int, slot: int) -> None:
        """A slot was emptied."""
        self._leases[lease].slots.pop(slot, None)

    def observe(self, connections: Iterable[tuple[int, int]], now_s: float) -> list[GrantedLease]:
        """Takes the count of data connections per lease and moves leases on.

        Args:
            connections: pairs of lease and count.
            now_s: seconds of the clock used throughout.

        Returns:
            Leases that expired just now; the caller fences them, then calls `remove`.
        """
        for number, count in connections:
            if number in self._leases:
                self._leases[number].connections = count
        expired = []
        for lease in self._leases.values():
            self._settle(lease, now_s)
            if self._is_over(lease, now_s):
                lease.state = LeaseState.EXPIRED
                expired.append(lease)
        return expired

    @staticmethod
    def _is_over(lease: GrantedLease, now_s: float) -> bool:
        if lease.state is LeaseState.GRACE:
            return now_s >= lease.grace_until_s
        return (
            lease.state is LeaseState.ACTIVE
            and lease.session is None
            and now_s >= lease.alone_until_s
        )

    def expire(self, lease: int) -> None:
        """Ends a lease at once (released by its device)."""
        self._leases[lease].state = LeaseState.EXPIRED

    def remove(self, lease: int) -> None:
        """Forgets an expired lease."""
        self._leases.pop(lease, None)

    def _settle(self, lease: GrantedLease, now_s: float) -> None:
        if lease.state is LeaseState.EXPIRED:
            return
        if lease.session is not None or lease.connections > 0:
            lease.state = LeaseState.ACTIVE
        elif lease.state is LeaseState.ACTIVE:
            lease.state = LeaseState.GRACE
            lease.grace_until_s = now_s + self._grace_s


def consumer_leases(leases_max: int, connections_per_host_max: int) -> int:
    """Most leases of one consumer: for each its device's two data connections; never all there are.

    Args:
        leases_max: of the donor.
        connections_per_host_max: data connections of one address.
    """
    return max(1, min(connections_per_host_max, leases_max) // 2)


def _first_spare(leases: Iterable[GrantedLease]) -> GrantedLease | None:
    """Of the leases without a slab one whose device is away, else the oldest of the consumer that
    has most of them: whoever takes many takes them from itself."""
    spare = [e for e in leases if not e.slots and e.state is not LeaseState.EXPIRED]
    count = Counter(entry.consumer for entry in spare)
    return min(
        spare, key=lambda e: (e.session is not None, -count[e.consumer], e.lease), default=None
    )


def _full(text: str) -> RequestRefusedError:
    return RequestRefusedError(text, reason=m.REFUSED_QUOTA)


def _unknown(lease: int) -> RequestRefusedError:
    return RequestRefusedError(f"no lease {lease} of yours", reason=m.REFUSED_UNKNOWN_LEASE)
