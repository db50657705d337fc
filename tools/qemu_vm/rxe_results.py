# SPDX-License-Identifier: Apache-2.0
"""What the demo over soft-RoCE has shown: figures, their tables, and whether they will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infiniswap.units import PAGE_BYTES, format_size_short

_PAGES_S_MAX = 0.1
_PAGE_NS_MAX = 2000
"""Bounds of the processor time of a donor's page threads, all in all and per page: with one-sided
RDMA they wake a few times for the connection beside it. By TCP a page costs more than 100 000 ns in
a machine without KVM."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor time of a donor's host, seconds.

    Attributes:
        at_s: when, on the monotonic clock; of a difference: the time between.
        pages_s: the daemon's threads that serve pages by TCP.
        control_s: all its others: heartbeats, measuring memory, making slabs.
        softirq_s: of the kernel, soft interrupts: where packets come in.
        system_s: of the kernel otherwise, the daemon's system calls included: soft-RoCE's work
            queues are there.
    """

    at_s: float
    pages_s: float
    control_s: float
    softirq_s: float
    system_s: float

    def since(self, before: Cpu) -> Cpu:
        """What has come on top."""
        mine, theirs = asdict(self), asdict(before)
        return Cpu(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True, slots=True)
class Donor:
    """One donor during the job.

    Attributes:
        address: of its control API.
        transport: "rdma" or "tcp", as the device says; reason: why not RDMA.
        slabs: mapped at the end.
        read_pages, write_pages: by the device's counters.
        cpu: meanwhile.
        idle: some time after the job, with nothing going on.
    """

    address: str
    transport: str
    reason: str
    slabs: int
    read_pages: int
    write_pages: int
    cpu: Cpu
    idle: Cpu


@dataclass(frozen=True, slots=True)
class Results:
    """All of it.

    Attributes:
        pages: of the job; wrong: how many it found wrong.
        frontend: of the device.
        summary: what `infiniswap run` wrote.
    """

    pages: int
    wrong: int
    frontend: str
    summary: dict[str, Any]
    donors: tuple[Donor, ...]

    @property
    def read_pages(self) -> int:
        """Read from all donors."""
        return sum(donor.read_pages for donor in self.donors)


def problems(results: Results) -> list[str]:
    """Why this does not show what the demo is to show; empty when it does."""
    found = []
    if results.summary["exit_code"] != 0:
        found.append(f"the job ended with exit code {results.summary['exit_code']}")
    if results.wrong:
        found.append(f"{results.wrong} of {results.pages} pages were wrong")
    for donor in results.donors:
        if donor.transport != "rdma":
            why = f": {donor.reason}" if donor.reason else ""
            found.append(f"{donor.address} was reached by {donor.transport or 'nothing'}{why}")
        if not donor.read_pages or not donor.write_pages:
            found.append(f"{donor.address} did not hold any page that was read back")
        moved = donor.read_pages + donor.write_pages
        if (
            donor.transport == "rdma"
            and donor.cpu.pages_s > _PAGES_S_MAX + moved * _PAGE_NS_MAX / 1e9
        ):
            found.append(
                f"the daemon at {donor.address} spent {donor.cpu.pages_s:.3f} s on {moved} pages"
            )
    return found


def lines(results: Results) -> list[str]:
    """The closing lines."""
    summary, count = results.summary, len(results.donors)
    served = sum(summary[f"page_in_{place}_bytes"] for place in ("remote", "staging", "backup"))

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    rows: list[tuple[str, ...]] = [
        ("donor", "transport", "slabs", "read", "written", "share of reads")
    ]
    rows += [
        (
            donor.address,
            donor.transport or "-",
            str(donor.slabs),
            format_size_short(donor.read_pages * PAGE_BYTES),
            format_size_short(donor.write_pages * PAGE_BYTES),
            share(donor.read_pages, results.read_pages),
        )
        for donor in results.donors
    ]
    times: list[tuple[str, ...]] = [
        ("processor time", "daemon: pages", "daemon: rest", "softirq", "system")
    ]
    for donor in results.donors:
        times.append(_times(f"{donor.address}, job", donor.cpu))
        if donor.idle.at_s >= 1:
            times.append(_times("  idle", donor.idle))
    return [
        f"page check: {results.pages} pages of a job of "
        f"{format_size_short(results.pages * PAGE_BYTES)} with "
        f"{format_size_short(summary['local_bytes'])} of memory: {results.wrong} wrong",
        f"paged out {format_size_short(summary['page_out_bytes'])}, in "
        f"{format_size_short(summary['page_in_bytes'])} by {results.frontend}: "
        f"{share(summary['page_in_remote_bytes'], served)} from {count} donor"
        f"{'s' if count > 1 else ''}, {share(summary['page_in_staging_bytes'], served)} from "
        f"staging, {share(summary['page_in_backup_bytes'], served)} from the disk",
        "",
        *_table(rows),
        "",
        *_table(times),
    ]


def _times(what: str, cpu: Cpu) -> tuple[str, ...]:
    """A row; shares are of one processor."""
    parts = (cpu.control_s, cpu.softirq_s, cpu.system_s)
    shares = (f"{part / cpu.at_s:.1%}" if cpu.at_s else "-" for part in parts)
    return (f"{what} ({cpu.at_s:.0f} s)", f"{cpu.pages_s * 1000:.1f} ms", *shares)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
