# SPDX-License-Identifier: Apache-2.0
"""What a browser gets: donors as bars, devices as cells, made of a picture of the cluster. Pure.

Every figure is one of `infiniswap status --json`, or the difference of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from infiniswap.units import counted
from infiniswap.watch.changes import BAD, GOOD, Change
from infiniswap.watch.memory_parts import memory_parts

if TYPE_CHECKING:
    from infiniswap.control.messages import DeviceFigures, LeaseStatus, Status
    from infiniswap.watch.picture import Heard, Picture

DONORS_MAX: Final = 256
DEVICES_MAX: Final = 256
CELLS_MAX: Final = 16_384
"""In a model, so that it stays small enough for a browser; the rest is counted."""
_TOLD_MAX: Final = 12
"""Events of slabs at one look."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Pages per second of a device, between two of its answers."""

    in_donors: float
    in_disk: float
    out: float


@dataclass(slots=True)
class DeviceView:
    """A device, as the donors that it uses tell.

    Attributes:
        device_id: its UUID.
        lease: one of its leases, for names.
        figures: the latest that it has said of itself; None: nothing.
        rates: between the last two of these; None: not known.
        is_fresh: a donor that answers has told of it.
        places: by slab the addresses of the donors that hold it; two while it migrates.
        heat: by slab page I/O per second.
    """

    device_id: str
    lease: LeaseStatus
    figures: DeviceFigures | None = None
    rates: Rates | None = None
    is_fresh: bool = False
    places: dict[int, tuple[str, ...]] = field(default_factory=dict)
    heat: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"device {self.lease.device_name} of {self.lease.host_name}"


def devices(picture: Picture, before: Mapping[str, DeviceView]) -> dict[str, DeviceView]:
    """Every device that holds a lease, by its id.

    Args:
        picture: what the donors have said.
        before: devices of the picture before, for rates.
    """
    found: dict[str, DeviceView] = {}
    silent: list[tuple[str, Status]] = []
    for address, heard in picture.heard.items():
        if heard.donor.status is not None:
            _add(found, address, heard.donor.status, is_fresh=True)
        elif heard.status is not None:
            silent.append((address, heard.status))
    for address, status in silent:
        _add(found, address, status, is_fresh=False)
    for name, view in found.items():
        view.rates = _rates(before.get(name), view.figures)
    return found


def _add(found: dict[str, DeviceView], address: str, status: Status, *, is_fresh: bool) -> None:
    for lease in status.leases:
        if lease.state == "expired":
            continue
        view = found.setdefault(lease.device_id, DeviceView(lease.device_id, lease))
        said = lease.device
        if said and (view.figures is None or (is_fresh and said.uptime_s > view.figures.uptime_s)):
            view.figures = said
        view.is_fresh |= is_fresh
        if not is_fresh and view.is_fresh and view.figures and not view.figures.suspended:
            continue  # the device has given the donor up: nothing of it is there any longer
        for use in lease.slabs:
            placed = view.places.get(use.slab, ())
            if is_fresh or not placed:  # a donor that answers knows better
                view.places[use.slab] = (*placed, address)
                if use.pages_per_s is not None:
                    view.heat[use.slab] = max(use.pages_per_s, view.heat.get(use.slab, 0.0))


def _rates(before: DeviceView | None, now: DeviceFigures | None) -> Rates | None:
    old = before.figures if before else None
    if before is None or old is None or now is None:
        return None
    elapsed_s = now.uptime_s - old.uptime_s
    if elapsed_s == 0:
        return before.rates
    if elapsed_s < 0:
        return None  # another process
    moved = [
        (getattr(now, name) - getattr(old, name)) / elapsed_s
        for name in ("in_donors_pages", "in_disk_pages", "out_pages")
    ]
    return None if min(moved) < 0 else Rates(*(round(rate, 1) for rate in moved))


# ------------------------------------------------------------------------------ events


def slab_changes(
    before: Mapping[str, DeviceView],
    now: Mapping[str, DeviceView],
    names: Mapping[str, str],
) -> list[Change]:
    """What has happened to slabs, a few of them in words.

    Args:
        before, now: devices of two pictures.
        names: of donors, by address.
    """
    found = [
        change
        for device_id, view in now.items()
        if (old := before.get(device_id)) is not None
        for change in _slabs_of(old, view, names)
    ]
    more = len(found) - _TOLD_MAX
    if more > 0:
        found = [*found[:_TOLD_MAX], Change(f"and {counted(more, 'more slab')}")]
    return [*found, *_alarms(before, now)]


def _slabs_of(old: DeviceView, now: DeviceView, names: Mapping[str, str]) -> Iterator[Change]:
    def named(places: tuple[str, ...]) -> str:
        return " and ".join(names.get(address, address) for address in places)

    for slab in sorted(old.places.keys() | now.places.keys()):
        was, there = old.places.get(slab, ()), now.places.get(slab, ())
        if set(was) == set(there):
            continue
        if not was:
            yield Change(f"{now}: slab {slab} is on {named(there)}", GOOD)
        elif not there:
            yield Change(f"{now}: slab {slab} has left {named(was)}, and has no donor now")
        elif len(there) > len(was):
            target = tuple(place for place in there if place not in was)
            yield Change(f"{now}: slab {slab} is being moved to {named(target)}")
        else:
            gone = tuple(place for place in was if place not in there)
            yield Change(f"{now}: slab {slab} is on {named(there)}, and has left {named(gone)}")


def _alarms(before: Mapping[str, DeviceView], now: Mapping[str, DeviceView]) -> Iterator[Change]:
    for device_id, view in now.items():
        old = before.get(device_id)
        if old is None or old.figures is None or view.figures is None:
            continue
        if view.figures.suspended and not old.figures.suspended:
            yield Change(
                f"{view}: {counted(view.figures.suspended, 'slab')} cannot be reached", BAD
            )
        if view.figures.alarms > old.figures.alarms:
            said = "`infiniswap status` on its host says which"
            yield Change(f"{view}: raises an alarm; {said}", BAD)


# ------------------------------------------------------------------------------- model


def donor_row(address: str, heard: Heard, now_s: float) -> dict[str, Any]:
    """A donor; one that does not answer keeps its last figures, with their age."""
    row: dict[str, Any] = {
        "address": address,
        "name": address,
        "state": heard.donor.state,
        "answers": heard.donor.status is not None,
        "error": heard.donor.error,
        "age_s": None,
    }
    status = heard.status
    if status is None:
        return row
    held: dict[str, int] = {}
    for lease in status.leases:
        held[lease.host_name] = (
            held.get(lease.host_name, 0) + lease.slots_mapped * status.slab_bytes
        )
    return {
        **row,
        "name": status.donor_name,
        "age_s": round(heard.age_s(now_s), 1),
        "total_bytes": status.memory.total_bytes,
        "headroom_bytes": status.memory.headroom_bytes,
        "slab_bytes": status.slab_bytes,
        "segments": memory_parts(status),
        "lent_to": dict(sorted(held.items(), key=lambda one: -one[1])),
        "can_lend_bytes": status.pool.can_map * status.slab_bytes,
        "pages_per_s": heard.pages_per_s,
        "evictions": status.counters.get("evictions", 0),
        "notes": [
            *([f"lends no more slabs: it {status.no_room}"] if status.no_room else []),
            *status.degraded,
        ],
    }


def device_row(view: DeviceView, numbers: Mapping[str, int], cells_max: int) -> dict[str, Any]:
    """A device. `numbers`: of donors by address. A cell is [slab, [donors], pages per second]."""
    lease, figures, rates = view.lease, view.figures, view.rates
    listed = sorted(view.places)[:cells_max]
    return {
        "id": view.device_id,
        "name": lease.device_name,
        "host": lease.host_name,
        "certified": lease.host_certified is True,
        "job": lease.job,
        "user": lease.user,
        "fresh": view.is_fresh,
        "slabs": figures.slabs if figures else None,
        "size_bytes": figures.size_bytes if figures else None,
        "far_bytes": figures.far_bytes if figures else 0,
        "suspended": figures.suspended if figures else 0,
        "alarms": figures.alarms if figures else 0,
        "cells": [
            [slab, [numbers[a] for a in view.places[slab] if a in numbers], view.heat.get(slab)]
            for slab in listed
        ],
        "cells_left_out": len(view.places) - len(listed),
        "in_donors_per_s": rates.in_donors if rates else None,
        "in_disk_per_s": rates.in_disk if rates else None,
        "out_per_s": rates.out if rates else None,
        "page_in_us_p50": figures.page_in_us_p50 if figures else None,
        "page_in_us_p99": figures.page_in_us_p99 if figures else None,
    }


def model(picture: Picture, views: Mapping[str, DeviceView]) -> dict[str, Any]:
    """All that is drawn, as plain data."""
    addresses = list(picture.heard)[:DONORS_MAX]
    numbers = {address: number for number, address in enumerate(addresses)}
    ordered = sorted(
        views.values(), key=lambda v: (v.lease.host_name, v.lease.device_name, v.device_id)
    )
    rows, left = [], CELLS_MAX
    for view in ordered[:DEVICES_MAX]:
        rows.append(device_row(view, numbers, left))
        left -= len(rows[-1]["cells"])
    return {
        "donors": [
            donor_row(address, picture.heard[address], picture.at_s) for address in addresses
        ],
        "donors_left_out": len(picture.heard) - len(addresses),
        "devices": rows,
        "devices_left_out": len(ordered) - len(rows),
        "problems": list(picture.problems),
    }


def told(change: Change, at_unix_s: float) -> dict[str, Any]:
    """An event; tone is good, bad or neutral."""
    return {"at_s": round(at_unix_s, 1), "text": change.text, "tone": change.tone or "neutral"}


def sample(made: Mapping[str, Any], at_unix_s: float) -> dict[str, Any]:
    """What the charts keep of a model: all devices together."""
    rows = [row for row in made["devices"] if row["fresh"]]

    def total(key: str) -> float | None:
        values = [row[key] for row in rows if row[key] is not None]
        return round(sum(values), 1) if values else None

    def worst(key: str) -> float | None:
        return max((row[key] for row in rows if row[key] is not None), default=None)

    return {
        "at_s": round(at_unix_s, 1),
        "in_donors_per_s": total("in_donors_per_s"),
        "in_disk_per_s": total("in_disk_per_s"),
        "out_per_s": total("out_per_s"),
        "page_in_us_p50": worst("page_in_us_p50"),
        "page_in_us_p99": worst("page_in_us_p99"),
    }
