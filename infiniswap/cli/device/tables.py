# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap device` shows: every device as a table, one in full."""

from __future__ import annotations

from collections.abc import Mapping

from infiniswap.cli.common.output import results_console
from infiniswap.device.api import DeviceStatus, FarRow, SuccessionRow
from infiniswap.units import PAGE_BYTES, counted, format_size, format_size_short


def print_json(value: object) -> None:
    """For programs."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(running: list[DeviceStatus], others: Mapping[str, str]) -> None:
    """For people; `others` has the states of those that do not answer, by name."""
    from rich.table import Table

    if not running and not others:
        print("no devices; `infiniswap device start NAME --size SIZE --donors HOST` makes one")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "STATE", "SIZE", "PATH", "SLABS MAPPED", "SWAP USED", "FROM DONORS"):
        table.add_column(heading)
    for device in running:
        share = "-" if device.remote_share is None else f"{device.remote_share:.0%}"
        swap = format_size_short(device.swap.used_bytes) if device.swap.active else "-"
        mapped, total = device.slabs["mapped"], sum(device.slabs.values())
        table.add_row(
            device.name,
            device.state if not device.alarms else f"{device.state} (!)",
            format_size(device.size_bytes),
            device.path,
            f"{mapped} of {total}",
            swap,
            share,
        )
    for name, state in sorted(others.items()):
        table.add_row(name, state, "-", "-", "-", "-", "-")
    results_console().print(table)


def describe(status: DeviceStatus) -> list[tuple[str, str]]:
    """Rows of `device show`."""
    stats = status.stats
    share = "no page-in yet" if status.remote_share is None else f"{status.remote_share:.1%}"
    swap = "no"
    if status.swap.active:
        swap = (
            f"priority {status.swap.priority}, {format_size_short(status.swap.used_bytes)} in use"
        )
    rows = [
        ("name", f"{status.name} ({status.device_id})"),
        ("state", f"{status.state}, process {status.pid}, up {status.uptime_s:.0f} s"),
        ("size", f"{format_size(status.size_bytes)}, slabs of {format_size(status.slab_bytes)}"),
        ("path", f"{status.path} ({status.frontend})"),
        ("backup", status.backup or "none"),
        ("sealed", "yes" if status.sealed else "no"),
        ("swap", swap),
        *([] if status.far is None else [("far memory", _describe_far(status.far))]),
        ("slabs", ", ".join(f"{count} {state}" for state, count in status.slabs.items() if count)),
        ("on donors", format_size_short(status.pages_on_donors * PAGE_BYTES)),
        (
            "page-in",
            f"{format_size_short(stats['pages_in'] * PAGE_BYTES)}: "
            f"donors {format_size_short(stats['pages_in_remote'] * PAGE_BYTES)}, "
            f"staging {format_size_short(stats['pages_in_staging'] * PAGE_BYTES)}, "
            f"backup {format_size_short(stats['pages_in_backup'] * PAGE_BYTES)}, "
            f"zeros {format_size_short(stats['pages_in_zero'] * PAGE_BYTES)}",
        ),
        ("from donors", share),
        ("page-out", format_size_short(stats["pages_out"] * PAGE_BYTES)),
        ("page-in time", f"p50 {status.page_in_us_p50:.0f} µs, p99 {status.page_in_us_p99:.0f} µs"),
        (
            "backup reads",
            f"no donor {stats['fallback_unmapped']}, donor away {stats['fallback_suspended']}, "
            f"not there yet {stats['fallback_invalid']}, donor failed {stats['fallback_error']}, "
            f"donor slow {stats.get('fallback_slow', 0)}, "
            f"disk quicker {stats.get('fallback_quicker', 0)}, "
            f"to measure the disk {stats.get('fallback_measured', 0)} (pages)",
        ),
        ("quicker source", _describe_choice(status)),
        (
            "staging",
            f"{stats['staging_pages_used']} of {stats['staging_pages']} pages, "
            f"{stats['staging_waits']} waits",
        ),
    ]
    for donor in status.donors:
        detail = f" ({donor.detail})" if donor.detail else ""
        wire = f", {donor.transport}" if donor.transport else ""
        tried = f"; tried again {counted(donor.rdma_probes, 'time')}" if donor.rdma_probes else ""
        why = f" (no RDMA: {donor.transport_reason}{tried})" if donor.transport_reason else ""
        soon = f", a page in {donor.expected_us:.0f} µs" if donor.expected_us else ""
        what = f"{donor.state}, {counted(donor.slabs, 'slab')}{wire}{why}{soon}{detail}"
        rows.append(("donor", f"{donor.address} {donor.name}: {what}"))
    rows.append(("processors", "kept awake" if status.awake else "may sleep"))
    if (succession := status.succession) is not None:
        rows.append(("standby", _describe_succession(succession)))
    rows += [("degraded", item) for item in status.degraded]
    rows += [("ALARM", item) for item in status.alarms]
    return rows


def _describe_far(row: FarRow) -> str:
    def pages(name: str) -> str:
        return format_size_short(row.counts[name] * PAGE_BYTES)

    used, size, counts = format_size_short(row.used_bytes), format_size_short(row.bytes), row.counts
    parts = [f"{used} of {size} in use, by {counted(row.processes, 'process')}"]
    if row.problem:
        parts.append(f"not served: {row.problem}")
    if counts.get("pages_out"):
        parts.append(f"{pages('pages_out')} out, {pages('pages_in')} in")
    if waits := counts.get("room_waits"):
        parts.append(f"{counted(waits, 'wait')} for room")
    if pauses := counts.get("pauses"):
        parts.append(f"{counted(pauses, 'pause')} for touches at random")
    back = [name for name, count in counts.items() if name.startswith("back_") and count]
    parts += [f"{pages(name)} handed back ({name.removeprefix('back_')})" for name in back]
    if lost := counts.get("pages_lost"):
        parts.append(f"{counted(lost, 'page')} lost")
    return "; ".join(parts)


def _describe_choice(status: DeviceStatus) -> str:
    """Where pages that a donor and the backup both have are read from."""
    if status.backup is None:
        return "donors: there is no backup"
    if status.chosen_share is None:
        return "no page-in yet for which there was a choice"
    us = status.backup_expected_us
    disk = f", a page in {us:.0f} µs" if us else ""
    return (
        f"donors {status.chosen_share:.1%}, backup {1 - status.chosen_share:.1%}{disk} "
        "(of the page-ins that both could serve)"
    )


def _describe_succession(row: SuccessionRow) -> str:
    if not row.take_overs:
        return row.standby
    times = "one take-over" if row.take_overs == 1 else f"{row.take_overs} take-overs"
    return f"{row.standby}; {times}, the last ({row.reason}) with a pause of {row.pause_ms:.0f} ms"
