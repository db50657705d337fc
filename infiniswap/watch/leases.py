# SPDX-License-Identifier: Apache-2.0
"""A donor's leases for people and programs: who has how much of its memory, and since when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from infiniswap.units import format_size_short

if TYPE_CHECKING:
    from infiniswap.control.messages import LeaseStatus, Status

CLAIMED: Final = "*"
"""Behind the name of a host that shows no certificate."""
CLAIMED_NOTE: Final = f"{CLAIMED} as the device says: no certificate proves the host's name"
_UNKNOWN: Final = "-"


@dataclass(frozen=True, slots=True)
class ListedLease:
    """A lease, with what its donor's status says of it."""

    donor_name: str
    slab_bytes: int
    lease: LeaseStatus

    @property
    def held_bytes(self) -> int:
        """Memory of the donor that the device has now."""
        return self.lease.slots_mapped * self.slab_bytes

    @property
    def tenant(self) -> str:
        """On whose account; where nobody has said, the host's."""
        return self.lease.tenant or self.lease.host_name

    @property
    def since(self) -> str:
        """When it was granted, as ISO 8601 in UTC; empty: not known."""
        granted_s = self.lease.granted_unix_s
        if granted_s is None:
            return ""
        try:
            return datetime.fromtimestamp(granted_s, UTC).isoformat(timespec="seconds")
        except (OverflowError, ValueError, OSError):
            return ""  # of a clock that was far off

    def cells(self) -> Iterator[tuple[str, str]]:
        """Heading and text of each column."""
        lease = self.lease
        claimed = CLAIMED if lease.host_certified is False else ""
        user = lease.user or (_UNKNOWN if lease.uid is None else f"uid {lease.uid}")
        rate = lease.pages_per_s
        yield "host", f"{lease.host_name}{claimed}"
        yield "job", lease.job or _UNKNOWN
        yield "user", user
        yield "tenant", lease.tenant
        yield "device", lease.device_name
        yield "state", lease.state
        yield "held", format_size_short(self.held_bytes)
        yield "pages/s", _UNKNOWN if rate is None else f"{rate:.0f}"
        yield "since (UTC)", self.since[:16].replace("T", " ") or _UNKNOWN
        yield "transport", lease.transport or _UNKNOWN


def of_status(status: Status) -> list[ListedLease]:
    """The leases of a donor, those with the most memory first."""
    listed = [ListedLease(status.donor_name, status.slab_bytes, lease) for lease in status.leases]
    return by_size(listed)


def by_size(leases: Iterable[ListedLease]) -> list[ListedLease]:
    """Those with the most memory first."""
    return sorted(leases, key=lambda one: (-one.held_bytes, one.lease.host_name, one.lease.lease))


def is_any_claimed(leases: Iterable[ListedLease]) -> bool:
    """Whether the names of some hosts are not proved."""
    return any(one.lease.host_certified is False for one in leases)


def held_by_tenant(leases: Iterable[ListedLease]) -> dict[str, int]:
    """Bytes, the most first."""
    held: Counter[str] = Counter()
    for one in leases:
        held[one.tenant] += one.held_bytes
    return dict(held.most_common())


def as_json(leases: Sequence[ListedLease]) -> list[dict[str, Any]]:
    """As plain data: what the donor says, `held_bytes` and `since`."""
    import msgspec

    return [
        {
            **msgspec.to_builtins(one.lease),
            "held_bytes": one.held_bytes,
            "since": one.since or None,
        }
        for one in leases
    ]
