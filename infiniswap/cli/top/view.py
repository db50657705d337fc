# SPDX-License-Identifier: Apache-2.0
"""Draws a picture into a window: 80 x 24 is enough, and nothing is told by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from infiniswap.cli.top.sections import Column, Section, share_out
from infiniswap.control.text import printable
from infiniswap.units import format_size_short
from infiniswap.watch.changes import BAD, GOOD
from infiniswap.watch.leases import CLAIMED, CLAIMED_NOTE, is_any_claimed
from infiniswap.watch.memory_parts import memory_parts
from infiniswap.watch.picture import STALE_S

if TYPE_CHECKING:
    from infiniswap.control.messages import Status
    from infiniswap.watch.changes import Change
    from infiniswap.watch.leases import ListedLease
    from infiniswap.watch.picture import Heard, Picture

COLUMNS_MIN: Final = 60
LINES_MIN: Final = 13
SECTIONS: Final = ("donors", "devices on this host", "leases", "events")

_BAR_CELLS: Final = 16
_OWN, _CACHE, _LENT, _FREE, _HEADROOM = "#", "c", "=", ".", "-"
_LEGEND: Final = (
    f"memory: {_OWN} used  {_CACHE} cache in use  {_LENT} lent  {_FREE} free  {_HEADROOM} headroom"
)
_KEYS: Final = "0 all  1-4 one section  arrows scroll  p pause  q quit"
_NONE: Final = "-"
_TONES: Final = {GOOD: "green", BAD: "red"}


@dataclass(frozen=True, slots=True)
class Window:
    """What the reader has chosen.

    Attributes:
        columns, lines: of the terminal.
        focus: number of the only section that is shown, from 1; 0: all.
        first: row with which that begins.
        is_paused: the picture stays.
        clock: the time of day of the picture.
    """

    columns: int
    lines: int
    focus: int = 0
    first: int = 0
    is_paused: bool = False
    clock: str = ""


@dataclass(slots=True)
class Seen:
    """An event and when it was seen."""

    clock: str
    event: Change = field(repr=False)


def draw(picture: Picture | None, told: Sequence[Seen], window: Window) -> list[Text]:
    """The lines of the window, no more than it has.

    Args:
        picture: None before the first look.
        told: events, the last one last.
        window: where and what.
    """
    if window.columns < COLUMNS_MIN or window.lines < LINES_MIN:
        return _fit(
            f"This window has {window.columns} x {window.lines} characters; infiniswap top needs "
            f"{COLUMNS_MIN} x {LINES_MIN}. Make it larger, or press q.",
            window,
        )
    if picture is None:
        return [Text("infiniswap top: asking the donors ..."), Text(_KEYS, style="dim")]
    sections = [donors(picture), devices(picture), leases(picture), events(told)]
    notes = [
        Text(printable(problem), style="red", no_wrap=True) for problem in picture.problems[:1]
    ]
    if is_any_claimed(picture.leases()):
        notes.append(Text(CLAIMED_NOTE, style="dim", no_wrap=True))
    room = window.lines - 3 - len(notes)
    body: list[Text] = []
    if window.focus:
        body = sections[window.focus - 1].lines(window.columns, room, window.first)
    else:
        heights = share_out([section.lines_max for section in sections], room)
        for section, height in zip(sections, heights, strict=True):
            body += section.lines(window.columns, height)
    foot = [
        *notes,
        Text(_LEGEND, style="dim", no_wrap=True),
        Text(_KEYS, style="dim", no_wrap=True),
    ]
    blank = [Text("")] * (window.lines - 1 - len(body) - len(foot))
    return [_header(picture, window), *body, *blank, *foot]


def last_row(picture: Picture, told: Sequence[Seen], focus: int) -> int:
    """Number of the last row of the section that is shown alone; 0 where all are shown."""
    sections = (donors, devices, leases)
    if not focus:
        return 0
    rows = len(told) if focus > len(sections) else sections[focus - 1](picture).rows
    return max(0, rows - 1)


def _fit(sentence: str, window: Window) -> list[Text]:
    words, lines = sentence.split(), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > window.columns:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [Text(line) for line in lines[: max(1, window.lines)]]


def _header(picture: Picture, window: Window) -> Text:
    answered = sum(one.donor.status is not None for one in picture.heard.values())
    lent = sum(_lent(one.donor.status) for one in picture.heard.values() if one.donor.status)
    parts = [
        f"infiniswap top  {window.clock}",
        f"{answered} of {len(picture.heard)} donors answer",
        f"{format_size_short(lent)} lent",
    ]
    if window.is_paused:
        parts.append("PAUSED")
    return Text("   ".join(parts), style="bold reverse", no_wrap=True)


def _lent(status: Status) -> int:
    return status.pool.slabs_mapped * status.slab_bytes


def bar(status: Status, cells: int = _BAR_CELLS) -> str:
    """A donor's memory as characters: each stands for total / cells bytes."""
    parts, total = memory_parts(status), max(1, status.memory.total_bytes)
    drawn, upto_bytes = "", 0
    for sign, size_bytes in (
        (_OWN, parts["own"]),
        (_CACHE, parts["cache"]),
        (_LENT, parts["lent"]),
        (_FREE, parts["pool"] + parts["free"]),
        (_HEADROOM, parts["headroom"]),
    ):
        upto_bytes += size_bytes
        drawn += sign * (min(cells, round(upto_bytes / total * cells)) - len(drawn))
    return drawn.ljust(cells, _FREE)


def donors(picture: Picture) -> Section:
    """Every donor; one that does not answer keeps its last figures, with their age."""
    heard = list(picture.heard.values())
    now_s = picture.at_s
    statuses = [one.status for one in heard]

    def of(cell: Any) -> list[str]:
        return [_NONE if status is None else cell(status) for status in statuses]

    return Section(
        SECTIONS[0],
        [
            Column("DONOR", [_donor_name(one) for one in heard]),
            Column("STATE", [_state(one, now_s) for one in heard]),
            Column("MEMORY", of(lambda s: f"[{bar(s)}]")),
            Column("USED", of(lambda s: f"{s.memory.used_share:.0%}"), 3, is_number=True),
            Column(
                "TOTAL", of(lambda s: format_size_short(s.memory.total_bytes)), 2, is_number=True
            ),
            Column("LENT", of(lambda s: format_size_short(_lent(s))), is_number=True),
            Column(
                "CAN LEND",
                of(lambda s: format_size_short(s.pool.can_map * s.slab_bytes)),
                4,
                is_number=True,
            ),
            Column("PAGES/S", [_rate(one.pages_per_s) for one in heard], 5, is_number=True),
            Column("ADDRESS", [str(one.donor.address) for one in heard], 1),
        ],
        [_donor_style(one) for one in heard],
        "none is configured or announced; `infiniswap join` or --donors names one",
    )


def _donor_name(one: Heard) -> str:
    return one.status.donor_name if one.status else str(one.donor.address)


def _state(one: Heard, now_s: float) -> str:
    age_s = one.age_s(now_s)
    if one.donor.status is None and one.status is not None and age_s > STALE_S:
        return f"{one.donor.state}, {age_s:.0f} s old"
    return one.donor.state


def _donor_style(one: Heard) -> str:
    if one.donor.status is None:
        return "red" if one.status is None else "red dim"
    return "yellow" if one.donor.state != "serving" else ""


def _rate(per_s: float | None) -> str:
    return _NONE if per_s is None else f"{per_s:.0f}"


def devices(picture: Picture) -> Section:
    """This host's devices; one that does not serve has a state and no figures."""
    rows = picture.devices
    rates = [picture.rates[row["name"]] for row in rows]
    has_far = any("far_used_bytes" in row for row in rows)

    def size(key: str) -> list[str]:
        return [format_size_short(row[key]) if key in row else _NONE for row in rows]

    def micros(key: str) -> list[str]:
        return [f"{row[key]:.0f}" if row.get(key) else _NONE for row in rows]

    return Section(
        SECTIONS[1],
        [
            Column("DEVICE", [row["name"] for row in rows]),
            Column("STATE", [_device_state(row) for row in rows]),
            Column("SIZE", size("size_bytes"), 2, is_number=True),
            Column("SWAPPED", size("swap_used_bytes"), 6, is_number=True),
            *([Column("FAR", size("far_used_bytes"), 8, is_number=True)] if has_far else []),
            Column("ON DONORS", size("on_donors_bytes"), 3, is_number=True),
            Column("IN/S", [_rate(one.in_per_s if one else None) for one in rates], is_number=True),
            Column(
                "OUT/S", [_rate(one.out_per_s if one else None) for one in rates], is_number=True
            ),
            Column(
                "DISK",
                [_share(one.disk_share if one else None) for one in rates],
                7,
                is_number=True,
            ),
            Column("P50 µs", micros("page_in_us_p50"), 4, is_number=True),
            Column("P99 µs", micros("page_in_us_p99"), 5, is_number=True),
        ],
        ["red" if row.get("alarms") else "" for row in rows],
        "none runs here; `infiniswap run` starts one for a job",
    )


def _device_state(row: Any) -> str:
    return f"{row['state']} ALARM" if row.get("alarms") else str(row["state"])


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def leases(picture: Picture) -> Section:
    """Who uses the donors' memory."""
    found = picture.leases()
    return Section(
        SECTIONS[2],
        [
            Column("HOST", [_host(one) for one in found]),
            Column("JOB", [one.lease.job or _NONE for one in found]),
            Column("USER", [one.lease.user or _NONE for one in found], 4),
            Column("TENANT", [one.lease.tenant or _NONE for one in found], 2),
            Column("DEVICE", [one.lease.device_name for one in found], 1),
            Column("DONOR", [one.donor_name for one in found], 5),
            Column("HELD", [format_size_short(one.held_bytes) for one in found], is_number=True),
            Column("PAGES/S", [_rate(one.lease.pages_per_s) for one in found], 6, is_number=True),
            Column("SINCE (UTC)", [_since(one.since) for one in found], 3),
        ],
        ["" if one.lease.state == "active" else "yellow" for one in found],
        "nobody uses these donors' memory",
    )


def _host(one: ListedLease) -> str:
    return one.lease.host_name + ("" if one.lease.host_certified else CLAIMED)


def _since(iso: str) -> str:
    return iso[5:16].replace("T", " ") or _NONE


def events(told: Sequence[Seen]) -> Section:
    """What has happened since the start, the last one first."""
    last_first = list(reversed(told))
    return Section(
        SECTIONS[3],
        [
            Column("TIME", [one.clock for one in last_first]),
            Column("EVENT", [_marked(one.event) for one in last_first]),
        ],
        [_TONES.get(one.event.tone, "") for one in last_first],
        "nothing has changed since the start",
    )


def _marked(event: Change) -> str:
    return f"! {event.text}" if event.tone == BAD else event.text
