# SPDX-License-Identifier: Apache-2.0
"""What the jobs did, as a table and as JSON, and whether that keeps the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infiniswap.demo.donors import Served
from infiniswap.units import GIB, MIB, format_size_short

UNLIMITED = "unlimited"
INFINISWAP = "infiniswap"
FAR = "far"
DISK = "disk"


@dataclass(frozen=True, slots=True)
class Leg:
    """One run of the job; None where there is no such figure.

    Attributes:
        name: UNLIMITED, INFINISWAP, FAR or DISK.
        title: for the table.
        elapsed_s: of the job alone.
        limit_bytes: of its memory.
        anon_peak_bytes: highest anonymous memory, in RAM and swapped out.
        page_in_bytes: read from the swap area, and brought back from far memory.
        page_out_bytes: written to the swap area, and sent to far memory.
        far_out_bytes: of what was written, what went as far memory.
        page_in_us_p50: of page-ins, at the front end.
        page_in_us_p99: likewise.
        page_in_us_mean: mean time of a read request on the disk.
        page_in_staging_bytes: of what was read, what had not left this host yet.
        page_in_disk_bytes: of what was read, what the local disk served.
        page_in_chosen_bytes: of that, what a donor had, too, but the disk was the quicker source.
        other_swap_bytes: what the host's other swap areas took meanwhile, this job's or not.
        output: SHA-256 of each output file, by name.
    """

    name: str
    title: str
    limit_bytes: int | None = None
    elapsed_s: float = 0.0
    anon_peak_bytes: int = 0
    page_in_bytes: int = 0
    page_out_bytes: int = 0
    output: dict[str, str] = field(default_factory=dict)
    page_in_us_p50: float | None = None
    page_in_us_p99: float | None = None
    page_in_us_mean: float | None = None
    page_in_staging_bytes: int = 0
    page_in_disk_bytes: int = 0
    page_in_chosen_bytes: int = 0
    other_swap_bytes: int = 0
    far_out_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Floors:
    """Bounds of the results: below these the demo has shown nothing.

    Attributes:
        anon_peak_bytes: of the job.
        paged_bytes: in, and out; with far memory, what must have gone far.
        donors_share: of the page-ins, what donors served, and what they had as well but the disk
            had sooner.
        donors_share_min: what they served in any case.
        disk_share_max: of the page-ins, what came from the disk for want of a donor.
    """

    anon_peak_bytes: int = 768 * MIB
    paged_bytes: int = GIB // 4
    donors_share: float = 0.8
    donors_share_min: float = 0.5
    disk_share_max: float = 0.03


@dataclass(frozen=True, slots=True)
class Results:
    """Everything.

    Attributes:
        scale: TPC-H scale factor.
        legs: in the order they ran.
        donors: what each donor served in the infiniswap leg, by its own counters.
        throttle: "" when the disk was as slow as a cloud volume, else why it was not.
        disk_reads_per_s: 4 KiB reads per second that the probe got from the disk.
        disk_writes_per_s: likewise.
        total_s: of all, with making the data.
        no_far: why there is no leg with far memory; "" when there is one.
    """

    scale: str
    legs: tuple[Leg, ...]
    donors: tuple[Served, ...]
    throttle: str
    disk_reads_per_s: float
    disk_writes_per_s: float
    total_s: float
    no_far: str = ""
    floors: Floors = field(default_factory=Floors)

    def leg(self, name: str) -> Leg:
        """The leg of that name."""
        return next(leg for leg in self.legs if leg.name == name)

    @property
    def donors_read_bytes(self) -> int:
        """What the donors sent."""
        return sum(donor.read_bytes for donor in self.donors)

    @property
    def donors_share(self) -> float | None:
        """Part of the page-in bytes that donors served; None when nothing was paged in.

        Donors also send pages that are read ahead in vain, or a second time: so no more counts
        than what came from nowhere else.
        """
        leg = self.leg(INFINISWAP)
        elsewhere = leg.page_in_staging_bytes + leg.page_in_disk_bytes
        served = min(self.donors_read_bytes, leg.page_in_bytes - elsewhere)
        return served / leg.page_in_bytes if leg.page_in_bytes else None

    @property
    def disk_share(self) -> float | None:
        """Part of the page-in bytes that came from the local disk; None likewise."""
        leg = self.leg(INFINISWAP)
        return leg.page_in_disk_bytes / leg.page_in_bytes if leg.page_in_bytes else None

    @property
    def chosen_share(self) -> float:
        """Part of the page-in bytes that the disk served because it was the quicker source."""
        leg = self.leg(INFINISWAP)
        return leg.page_in_chosen_bytes / leg.page_in_bytes if leg.page_in_bytes else 0.0


def failures(results: Results) -> list[str]:
    """Results that miss their bounds; empty is success."""
    found = []
    floors = results.floors
    reference = results.leg(UNLIMITED)
    for leg in results.legs:
        differing = sorted(
            name
            for name in reference.output.keys() | leg.output.keys()
            if reference.output.get(name) != leg.output.get(name)
        )
        if differing:
            found.append(f"the output of the {leg.name} job differs: {', '.join(differing)}")
    if not reference.output:
        found.append("the jobs wrote nothing")
    if reference.anon_peak_bytes < floors.anon_peak_bytes:
        found.append(
            f"the job's anonymous memory peaked at {format_size_short(reference.anon_peak_bytes)},"
            f" below {format_size_short(floors.anon_peak_bytes)}"
        )
    paged = results.leg(INFINISWAP)
    for way, count_bytes in (("out", paged.page_out_bytes), ("in", paged.page_in_bytes)):
        if count_bytes < floors.paged_bytes:
            found.append(
                f"only {format_size_short(count_bytes)} were paged {way} with infiniswap, not "
                f"{format_size_short(floors.paged_bytes)}"
            )
    far_bytes = floors.paged_bytes if results.no_far else results.leg(FAR).far_out_bytes
    if far_bytes < floors.paged_bytes:
        found.append(
            f"only {format_size_short(far_bytes)} left as far memory, not "
            f"{format_size_short(floors.paged_bytes)}"
        )
    share = results.donors_share
    if share is not None and (
        share + results.chosen_share < floors.donors_share or share < floors.donors_share_min
    ):
        floor = max(floors.donors_share - results.chosen_share, floors.donors_share_min)
        found.append(f"the donors served {share:.1%} of the page-in bytes, not {floor:.0%}")
    disk_share = results.disk_share
    from_disk = 0.0 if disk_share is None else disk_share - results.chosen_share
    if from_disk > floors.disk_share_max:
        found.append(
            f"{from_disk:.1%} of the page-in bytes came from the local disk although it was not "
            f"the quicker source, more than {floors.disk_share_max:.0%}"
        )
    return found


def remarks(results: Results) -> list[str]:
    """Notes that a reader of the table needs."""
    found = []
    if results.throttle:
        found.append(f"The disk was not as slow as a cloud volume: {results.throttle}.")
    paged = results.leg(INFINISWAP)
    if paged.page_in_staging_bytes or paged.page_in_disk_bytes:
        found.append(
            f"With infiniswap {format_size_short(paged.page_in_staging_bytes)} were paged in again "
            f"before they had left this host, and {format_size_short(paged.page_in_disk_bytes)} "
            "came from its disk"
            + (
                f" ({format_size_short(paged.page_in_chosen_bytes)} because it was the quicker "
                "source)."
                if paged.page_in_chosen_bytes
                else "."
            )
        )
    for leg in results.legs:
        if leg.other_swap_bytes >= MIB:
            found.append(
                f"During the {leg.name} job {format_size_short(leg.other_swap_bytes)} went to "
                "other swap areas of this host; swap is host-wide, so some may be the job's."
            )
    return found + _about_far(results)


def _about_far(results: Results) -> list[str]:
    if results.no_far:
        return [f"There was no job with far memory: {results.no_far}"]
    leg = results.leg(FAR)
    share = leg.far_out_bytes / leg.page_out_bytes if leg.page_out_bytes else 0.0
    return [
        f"With far memory {share:.1%} of what left went in blocks of 2 MiB, the rest as swap. Its "
        "backup was on this machine's disk as fast as it is."
    ]


def as_json(results: Results, failed: Sequence[str]) -> dict[str, Any]:
    """The whole as plain data."""
    return {
        "ok": not failed,
        "failures": list(failed),
        "remarks": remarks(results),
        "donors_share": results.donors_share,
        "disk_share": results.disk_share,
        **asdict(results),
    }


def table(results: Results) -> Any:
    """A table for `rich`."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("job", no_wrap=True)
    for heading in ("memory", "time", "slowdown", "anonymous peak", "paged out", "paged in"):
        made.add_column(heading, justify="right", no_wrap=heading != "anonymous peak")
    made.add_column("from donors", justify="right")
    made.add_column("page-in time", justify="right", no_wrap=True)
    base_s = results.leg(UNLIMITED).elapsed_s
    for leg in results.legs:
        made.add_row(*cells(leg, base_s, results.donors_share))
    return made


def cells(leg: Leg, base_s: float, donors_share: float | None) -> tuple[str, ...]:
    """One row of the table."""
    paged = leg.limit_bytes is not None
    share = donors_share if leg.name == INFINISWAP else None
    return (
        leg.title,
        format_size_short(leg.limit_bytes) if leg.limit_bytes is not None else "no limit",
        f"{leg.elapsed_s:.1f} s",
        f"{leg.elapsed_s / base_s:.2f} x" if base_s else "-",
        format_size_short(leg.anon_peak_bytes),
        format_size_short(leg.page_out_bytes) if paged else "-",
        format_size_short(leg.page_in_bytes) if paged else "-",
        f"{share:.1%}" if share is not None else "-",
        _times(leg),
    )


def _times(leg: Leg) -> str:
    if leg.page_in_us_p50 is not None and leg.page_in_us_p99 is not None:
        p50, p99 = format_us(leg.page_in_us_p50), format_us(leg.page_in_us_p99)
        return f"p50 {p50}, p99 {p99}"
    if leg.page_in_us_mean is not None:
        return f"mean {format_us(leg.page_in_us_mean)}"
    return "-"


def format_us(time_us: float) -> str:
    """A time with about three digits."""
    if time_us < 999.5:
        return f"{time_us:.0f} µs"
    return f"{time_us / 1000:.3g} ms"
