# SPDX-License-Identifier: Apache-2.0
"""`infiniswap status`: every donor asked at once, and this host's devices."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infiniswap.cli.common.donors import load_with_donors
from infiniswap.cli.common.leases import table as leases_table
from infiniswap.cli.common.output import results_console
from infiniswap.cli.common.parser import add_shared
from infiniswap.discovery.find import Found, find
from infiniswap.discovery.static import NO_DONOR_MEND
from infiniswap.errors import NoDonorError
from infiniswap.units import counted, format_size, format_size_short
from infiniswap.watch import leases
from infiniswap.watch.asking import AskedDonor, ask, local_donor

if TYPE_CHECKING:
    from infiniswap.control.messages import Status


def add_parser(subparsers: Any) -> None:
    """Adds the parser of `status`."""
    parser = subparsers.add_parser(
        "status",
        help="donors, devices, slabs and errors of the cluster",
        description="Asks every donor that is configured or announced, and shows this host's "
        "devices. A donor that cannot be reached is a row of the table, not a failure.",
    )
    add_shared(parser, "--config", "--json", "--secret-file")
    parser.add_argument(
        "--donors",
        metavar="H[:P],...",
        help="ask only these donors, by address or name (default: those configured or announced)",
    )


_UNLIMITED_COLUMNS = 1_000
_LINES = ("transport_reasons", "degraded", "alarms", "errors_by_kind")
"""Keys of a device that are printed as sentences below the tables."""
_DONOR_ERRORS = {
    "data_protocol_errors": "data connections that broke the protocol",
    "harvest_errors": "failed looks at the host's memory",
    "lease_errors": "leases that could not be ended",
    "protocol_errors": "control connections that broke the protocol",
    "request_errors": "refused requests for pages",
    "secret_errors": "connections with another secret",
}
"""Counters of a donor that its table sums up."""
_NAMED_MAX = 3
"""Donors, in a sentence."""
_STYLES = {"serving": "", "draining": "yellow", "drained": "yellow"}
_HEADINGS = {
    "far_used_bytes": "far memory",
    "on_donors_bytes": "on donors",
    "in_donors_bytes": "read from donors",
    "in_disk_bytes": "read from disk",
    "out_bytes": "written",
    "page_in_us_p50": "page-in p50 µs",
    "page_in_us_p99": "page-in p99 µs",
}


def run(args: argparse.Namespace) -> int:
    """Prints the status; 0 also when donors are unreachable."""
    config = load_with_donors(args.config, args.donors, {"cluster.secret_file": args.secret_file})
    from infiniswap.control.access import client_config

    found = find(config)
    # Without any known donor this host may be one; if it is not, that is no error.
    guessed = not found.addresses
    asked = found.addresses or (config.daemon.listen,)
    rows = asyncio.run(ask(asked, client_config(config, config.cluster.ask_s), local_donor(config)))
    if guessed:
        rows = [row for row in rows if row.status is not None]
    from infiniswap.device.control.listing import local_devices

    devices = local_devices(config.device.run_dir, config.device.backup_dir)
    if args.json:
        json.dump({**as_json(rows, devices), "discovery": _discovery(found)}, sys.stdout, indent=2)
        print()
    else:
        _print_tables(rows, devices)
        for sentence in _discovery(found)["problems"]:
            print(f"discovery: {sentence}")
    return 0


def _discovery(found: Found) -> dict[str, Any]:
    """What the broker said, as plain data."""
    return {
        "announced": [str(donor.address) for donor in found.announced],
        "problems": found.problems,
        "ignored": dict(found.ignored),
    }


def lendable(rows: Sequence[AskedDonor]) -> tuple[int, str]:
    """What these donors can lend together, in bytes, and why some of them lend nothing.

    Raises:
        InfiniswapError: none of them has answered with its status.
    """
    found = [row.status for row in rows if row.status is not None]
    failures = [row.failure for row in rows if row.failure is not None]
    if not found:
        if len(failures) == 1:
            raise failures[0]
        whats = [f"{row.address}: {row.failure.what}" for row in rows if row.failure is not None]
        what = f"none of the donors can be used: {'; '.join(_first(whats))}"
        if len({type(failure) for failure in failures}) > 1:
            raise NoDonorError(what)
        raise type(failures[0])(what, mend=failures[0].mend)
    reasons = [
        f"{row.address} {row.status.no_room or 'does not say why'}"
        if row.status is not None
        else f"{row.address}: {row.failure.what if row.failure else row.error}"
        for row in rows
        if row.status is None or not row.status.pool.can_map
    ]
    size_bytes = sum(status.pool.can_map * status.slab_bytes for status in found)
    return size_bytes, "; ".join(_first(reasons))


def _first(sentences: Iterable[str]) -> list[str]:
    """The first few, and how many there are besides."""
    said = list(sentences)
    more = [f"{len(said) - _NAMED_MAX} more"] if len(said) > _NAMED_MAX else []
    return said[:_NAMED_MAX] + more


def as_json(rows: Iterable[AskedDonor], devices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole status as plain data."""
    import msgspec

    return {
        "donors": [
            {
                "address": str(row.address),
                "reachable": row.status is not None,
                "state": row.state,
                "error": row.error or None,
                "status": None if row.status is None else msgspec.to_builtins(row.status),
            }
            for row in rows
        ],
        "devices": [msgspec.to_builtins(device) for device in devices],
    }


def _print_tables(rows: Sequence[AskedDonor], devices: Sequence[Mapping[str, Any]]) -> None:
    console = results_console()

    def say(sentence: str, style: str | None = None) -> None:
        console.print(sentence, style=style, markup=False, highlight=False)

    if rows:
        console.print(_donor_table(rows))
    else:
        say(f"No donor is configured, and none runs here. {NO_DONOR_MEND}")
    listed = leases.by_size(
        one for row in rows if row.status is not None for one in leases.of_status(row.status)
    )
    if listed:
        console.print(leases_table("leases", listed, with_donor=True))
        if leases.is_any_claimed(listed):
            say(leases.CLAIMED_NOTE)
    for table in _device_tables(devices, console) if devices else ():
        console.print(table)
    for device in devices:
        if alarms := device.get("alarms"):
            say(f"device {device['name']}: ALARM: {alarms}", "red")
        for sentence in _sentences(device):
            say(f"device {device['name']}: {sentence}")
    for row in rows:
        if row.status is None:
            say(f"{row.address}: {row.error}", "red")
        else:
            for sentence in _donor_sentences(row.status):
                say(f"{row.address}: {sentence}")


def _donor_sentences(status: Status) -> Iterator[str]:
    if status.no_room:
        yield f"lends no more slabs: it {status.no_room}"
    yield from status.degraded
    yield from _which_errors({_DONOR_ERRORS[key]: count for key, count in _errors(status).items()})
    if status.leases_left_out:
        left_out = counted(status.leases_left_out, "more lease")
        yield f"not listed: {left_out}, with the fewest slabs"


def _sentences(device: Mapping[str, Any]) -> Iterator[str]:
    for reason, donors in device.get("transport_reasons", {}).items():
        named = ", ".join(donors[:_NAMED_MAX])
        more = f" and {len(donors) - _NAMED_MAX} more" if len(donors) > _NAMED_MAX else ""
        yield f"no RDMA to {named}{more}: {reason}"
    yield from device.get("degraded", ())
    yield from _which_errors(device.get("errors_by_kind", {}))


def _which_errors(by_kind: Mapping[str, int]) -> Iterator[str]:
    if found := [f"{kind} ({count})" for kind, count in by_kind.items() if count]:
        yield f"errors: {', '.join(found)}"


def _donor_table(rows: Sequence[AskedDonor]) -> Any:
    from rich.text import Text

    table = _table("donors")
    table.add_column("address", no_wrap=True)
    table.add_column("name", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    for heading in ("slab", "lent", "can lend", "memory used", "errors"):
        table.add_column(heading, justify="right", no_wrap=heading != "memory used")
    for row in rows:
        state = Text(row.state, style=_STYLES.get(row.state, "red"))
        if row.status is None:
            table.add_row(str(row.address), "", state)
            continue
        status = row.status
        slab_bytes, pool = status.slab_bytes, status.pool
        table.add_row(
            str(row.address),
            Text(status.donor_name),
            state,
            format_size(slab_bytes),
            format_size_short(pool.slabs_mapped * slab_bytes),
            format_size_short(pool.can_map * slab_bytes),
            f"{status.memory.used_share:.0%} of {format_size_short(status.memory.total_bytes)}",
            str(sum(_errors(status).values())),
        )
    return table


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _errors(status: Status) -> dict[str, int]:
    return {name: status.counters.get(name, 0) for name in _DONOR_ERRORS}


def _device_tables(devices: Sequence[Mapping[str, Any]], console: Any) -> Iterator[Any]:
    """One of all devices; where the console is too narrow for it, one of two columns for each."""
    from rich.text import Text

    title = "devices on this host"
    columns = list(dict.fromkeys(key for device in devices for key in device if key not in _LINES))
    table = _table(title)
    for column in columns:
        table.add_column(_heading(column))
    for device in devices:
        table.add_row(*(Text(_cell(column, device.get(column))) for column in columns))
    unlimited = console.options.update(max_width=_UNLIMITED_COLUMNS)
    if console.measure(table, options=unlimited).maximum <= console.width:
        yield table
        return
    for device in devices:
        table = _table(title)
        table.show_header = False
        title = ""
        for _ in range(2):
            table.add_column(overflow="fold")
        for column in columns:
            table.add_row(_heading(column), Text(_cell(column, device.get(column))))
        yield table


def _heading(column: str) -> str:
    return _HEADINGS.get(column, column.removesuffix("_bytes").replace("_", " "))


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if column.endswith("_bytes") and isinstance(value, int):
        return format_size_short(value)
    return str(value)
