# SPDX-License-Identifier: Apache-2.0
"""What is shown, made of two looks at the cluster: rates are differences between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from infiniswap.units import PAGE_BYTES
from infiniswap.watch.leases import ListedLease, by_size, of_status

if TYPE_CHECKING:
    from infiniswap.control.messages import Status
    from infiniswap.watch.asking import AskedDonor

STALE_S: Final = 5.0
"""An answer older than this is shown as old."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a donor said last.

    Attributes:
        donor: its answer, or why there is none now.
        status: its last status, perhaps of an earlier look; None: it never answered.
        at_s: when it gave that.
        pages: read and written of this host's memory since its start.
        pages_per_s: read and written, between its last two answers; None: not known yet.
    """

    donor: AskedDonor
    status: Status | None
    at_s: float
    pages: int
    pages_per_s: float | None

    def age_s(self, now_s: float) -> float:
        """Seconds since it gave its status."""
        return now_s - self.at_s


def hear(before: Heard | None, donor: AskedDonor, now_s: float) -> Heard:
    """Adds an answer to what was heard before."""
    if donor.status is None:
        if before is None:
            return Heard(donor, None, now_s, 0, None)
        return Heard(donor, before.status, before.at_s, before.pages, None)
    bytes_moved = sum(lease.read_bytes + lease.write_bytes for lease in donor.status.leases)
    pages = bytes_moved // PAGE_BYTES
    rate = None
    if before is not None and before.status is not None and now_s > before.at_s:
        # A lease that ended takes its totals with it.
        rate = max(0, pages - before.pages) / (now_s - before.at_s)
    return Heard(donor, donor.status, now_s, pages, rate)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device did between two looks.

    Attributes:
        in_per_s, out_per_s: pages.
        disk_share: of the pages that came in, how many the disk served; None: none came.
    """

    in_per_s: float
    out_per_s: float
    disk_share: float | None


_IN_DONORS: Final = "in_donors_bytes"
_IN_DISK: Final = "in_disk_bytes"
_OUT: Final = "out_bytes"


def device_rates(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], elapsed_s: float
) -> DeviceRates | None:
    """Between two rows of a device (`status --json`); None: it was not there, or began again."""
    keys = (_IN_DONORS, _IN_DISK, _OUT)
    if (
        before is None
        or elapsed_s <= 0
        or any(key not in row for row in (before, now) for key in keys)
    ):
        return None
    donors, disk, out = ((now[key] - before[key]) / PAGE_BYTES for key in keys)
    if min(donors, disk, out) < 0:
        return None
    came = donors + disk
    return DeviceRates(came / elapsed_s, out / elapsed_s, disk / came if came else None)


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is shown at one moment.

    Attributes:
        at_s: of the clock of the looks.
        heard: by address, in the order of the donors.
        devices: rows of this host's devices as in `status --json`, and their rates by name.
        problems: what is wrong with the discovery, in sentences.
    """

    at_s: float
    heard: Mapping[str, Heard]
    devices: Sequence[Mapping[str, Any]]
    rates: Mapping[str, DeviceRates | None]
    problems: Sequence[str] = ()

    def leases(self) -> list[ListedLease]:
        """Of all donors that answered, those with the most memory first."""
        statuses = [one.donor.status for one in self.heard.values()]
        return by_size(
            lease for status in statuses if status is not None for lease in of_status(status)
        )


def look(
    before: Picture | None,
    donors: Sequence[AskedDonor],
    devices: Sequence[Mapping[str, Any]],
    problems: Sequence[str],
    now_s: float,
) -> Picture:
    """The next picture.

    Args:
        before: None at the first look.
        donors, devices, problems: what was found out.
        now_s: of a monotonic clock.
    """
    old = before.heard if before else {}
    rows = {row["name"]: row for row in before.devices} if before else {}
    elapsed_s = now_s - before.at_s if before else 0.0
    return Picture(
        at_s=now_s,
        heard={
            str(donor.address): hear(old.get(str(donor.address)), donor, now_s) for donor in donors
        },
        devices=devices,
        rates={row["name"]: device_rates(rows.get(row["name"]), row, elapsed_s) for row in devices},
        problems=problems,
    )
