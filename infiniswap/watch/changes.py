# SPDX-License-Identifier: Apache-2.0
"""What has happened between two pictures, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from infiniswap.units import format_size_short
from infiniswap.watch.leases import ListedLease, of_status

if TYPE_CHECKING:
    from infiniswap.control.messages import Status
    from infiniswap.watch.picture import Heard, Picture

GOOD: Final = "good"
BAD: Final = "bad"
NEUTRAL: Final = ""


@dataclass(frozen=True, slots=True)
class Change:
    """`tone`: GOOD, BAD or NEUTRAL."""

    text: str
    tone: str = NEUTRAL


def between(before: Picture, now: Picture) -> list[Change]:
    """Donors first, then devices."""
    return [*_donors(before, now), *_devices(before, now)]


def _donors(before: Picture, now: Picture) -> Iterator[Change]:
    for address, heard in now.heard.items():
        old = before.heard.get(address)
        if old is None:
            yield Change(f"{_name(heard)}: {heard.donor.state}")
            continue
        if old.donor.state != heard.donor.state:
            yield _state(heard)
        if old.status is not None and heard.donor.status is not None:
            yield from _answers(_name(heard), old.status, heard.donor.status)
    for address, old in before.heard.items():
        if address not in now.heard:
            yield Change(f"{_name(old)}: no longer announced", BAD)


def _name(heard: Heard) -> str:
    return heard.status.donor_name if heard.status else str(heard.donor.address)


def _state(heard: Heard) -> Change:
    state = heard.donor.state
    if state == "serving":
        return Change(f"{_name(heard)}: serving again", GOOD)
    if heard.donor.status is not None:
        return Change(f"{_name(heard)}: {state}")
    return Change(f"{_name(heard)}: {state}: {heard.donor.error}", BAD)


_COUNTED: Final = (
    ("evictions", "took back {} {slabs} from its consumers"),
    ("evictions_forced", "took {} {slabs} back at once, without moving them first"),
)


def _answers(name: str, old: Status, now: Status) -> Iterator[Change]:
    """What a donor's two answers tell."""
    if old.incarnation != now.incarnation:
        yield Change(f"{name}: its daemon has started again")
        return
    for counter, words in _COUNTED:
        more = now.counters.get(counter, 0) - old.counters.get(counter, 0)
        if more > 0:
            said = words.format(more, slabs="slab" if more == 1 else "slabs")
            yield Change(f"{name}: {said}", BAD)
    before = {one.lease.lease: one for one in of_status(old)}
    after = {one.lease.lease: one for one in of_status(now)}
    # Of a donor with more leases than it lists, some come and go for that alone.
    if old.leases_left_out or now.leases_left_out:
        return
    for number in after.keys() - before.keys():
        yield Change(f"{name}: {_who(after[number])} got a lease")
    for number in before.keys() - after.keys():
        gone = before[number]
        yield Change(f"{name}: {_who(gone)} gave up {format_size_short(gone.held_bytes)}")


def _who(one: ListedLease) -> str:
    lease = one.lease
    return f"{lease.job or lease.device_name} on {lease.host_name}"


def _devices(before: Picture, now: Picture) -> Iterator[Change]:
    old = {row["name"]: row for row in before.devices}
    new = {row["name"]: row for row in now.devices}
    for name, row in new.items():
        if name not in old:
            yield Change(f"device {name}: {row['state']}")
        else:
            yield from _device(name, old[name], row)
    for name in old.keys() - new.keys():
        yield Change(f"device {name}: gone")


def _device(name: str, old: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Change]:
    if old["state"] != row["state"]:
        tone = GOOD if row["state"] == "serving" else NEUTRAL
        yield Change(f"device {name}: {row['state']}", tone)
    if (alarms := row.get("alarms", "")) != old.get("alarms", ""):
        yield (
            Change(f"device {name}: {alarms}", BAD)
            if alarms
            else Change(f"device {name}: no alarm is left", GOOD)
        )
    more = row.get("errors", 0) - old.get("errors", 0)
    if more > 0:
        yield Change(f"device {name}: {more} more {'error' if more == 1 else 'errors'}", BAD)
