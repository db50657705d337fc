# SPDX-License-Identifier: Apache-2.0
"""A device's metrics: each is declared here once, with the place that its values come from.

`make man` writes the table of docs/metrics.md from this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Final

from infiniswap import __version__
from infiniswap.config import TRANSPORT_NAMES
from infiniswap.control.figures import (
    Declarer,
    Figures,
    Metric,
    Values,
    figures,
    histogram,
)
from infiniswap.control.messages import GOODBYE_FLOOD, GOODBYE_PROTOCOL
from infiniswap.device.process.report import DeviceSnapshot
from infiniswap.engine.protocol import FarTold
from infiniswap.system.pressure import memory_stalls
from infiniswap.units import PAGE_BYTES

Read = Callable[[DeviceSnapshot], Values]


def _status(field: str) -> Read:
    """A field of DeviceStatus."""
    get = attrgetter(field)
    return lambda s: get(s.status)


def _status_length(field: str) -> Read:
    """The length of a list of DeviceStatus."""
    return lambda s: len(getattr(s.status, field))


def _engine(field: str, unit: float = 1) -> Read:
    """A field of struct isw_engine_stats."""
    return lambda s: s.figures.counts[field] * unit


def _engine_by(fields: Mapping[str, str], unit: int = 1) -> Read:
    """Fields of struct isw_engine_stats by the label's value."""
    return lambda s: {label: s.figures.counts[field] * unit for label, field in fields.items()}


def _latency(fields: Mapping[tuple[str, ...], str]) -> Read:
    """Histograms of struct isw_engine_stats by the labels' values."""
    return lambda s: {
        labels: histogram(s.figures.latency[field], s.figures.latency_bounds_ns)
        for labels, field in fields.items()
    }


def _far(field: str) -> Read:
    """A field of FarRow; 0 of a device without far memory."""
    return lambda s: 0 if s.status.far is None else getattr(s.status.far, field)


def _far_count(field: str, unit: float = 1) -> Read:
    """A field of FarRow.counts."""
    return lambda s: _told(s, field) * unit


def _far_by(fields: Mapping[str, str]) -> Read:
    """Fields of FarRow.counts by the label's value."""
    return lambda s: {label: _told(s, field) for label, field in fields.items()}


def _told(snapshot: DeviceSnapshot, field: str) -> int:
    far = snapshot.status.far
    return 0 if far is None else far.counts[field]


def _slab_counts(field: str) -> Read:
    """A field of SlabCounts."""
    return lambda s: s.status.slab_counts[field]


def _donors(field: str) -> Read:
    """A field of each donor's DonorRow."""
    return lambda s: {row.address: getattr(row, field) for row in s.status.donors}


def _links(field: str) -> Read:
    """A field of the LinkCounts of each donor."""
    return lambda s: {address: getattr(counts, field) for address, counts in s.links.items()}


def _by_transport(index: int, unit: int = 1) -> Read:
    """Pages of each donor by transport; `index`: which of DonorRow.pages_by_transport."""
    return lambda s: {
        (row.address, transport): pages[index] * unit
        for row in s.status.donors
        for transport, pages in row.pages_by_transport().items()
    }


_declare = Declarer[DeviceSnapshot]("infiniswap_device_")
_gauge, _counter, _each = _declare.gauge, _declare.counter, _declare.each
_histogram = _declare.histogram


def _pages_and_bytes(
    in_pages: str,
    in_bytes: str,
    what: str,
    read: Callable[[int], Read],
    *labels: str,
    notes: str = "",
) -> tuple[Metric[DeviceSnapshot], Metric[DeviceSnapshot]]:
    """A counter of pages, and the same in bytes."""
    return (
        _counter(in_pages, f"Pages {what}.", read(1), *labels, notes=notes),
        _counter(in_bytes, f"Bytes {what}.", read(PAGE_BYTES), *labels),
    )


_FAR_FIELDS: Final = tuple(field.name for field in dataclasses.fields(FarTold))
_FAR_BACK: Final = {
    name.removeprefix("back_"): name for name in _FAR_FIELDS if name.startswith("back_")
}
_FAR_OFF: Final = {
    name.removeprefix("off_"): name for name in _FAR_FIELDS if name.startswith("off_")
}
_OPS: Final = ("read", "write", "trim", "zero", "flush")
_SOURCES: Final = {from_: f"pages_in_{from_}" for from_ in ("remote", "staging", "backup", "zero")}
_TARGETS: Final = {to: f"pages_out_{to}" for to in ("remote", "backup")}
_FALLBACKS: Final = (
    *("unmapped", "suspended", "invalid", "error", "slow"),
    *("quicker", "measured"),
)
_ERRORS: Final = {
    "remote": "remote_errors",
    "remote_crc": "crc_errors_remote",
    "backup": "backup_errors",
    "backup_crc": "crc_errors_backup",
    "event_dropped": "events_dropped",
}
_BROKEN: Final = (GOODBYE_FLOOD, GOODBYE_PROTOCOL)
_DONOR: Final = ("donor", "transport")

METRICS: Final = (
    _gauge(
        "info",
        "Always 1.",
        lambda s: {(__version__, s.status.frontend, s.status.path): 1},
        *("version", "frontend", "path"),
    ),
    _gauge(
        "start_time_seconds",
        "When this process began to serve, in Unix time.",
        lambda s: s.started_s,
    ),
    *_each(
        "gauge",
        _status,
        ("size_bytes", "Size of the block device.", "size_bytes"),
        ("slab_bytes", "Size of a slab.", "slab_bytes"),
        ("swap_active", "1 while the device is swap space.", "swap.active"),
        (
            "swap_used_bytes",
            "Memory swapped out to the device or kept by zswap.",
            "swap.used_bytes",
        ),
        ("remote_valid_pages", "Pages with a valid copy on a donor.", "pages_on_donors"),
        ("processors_awake", "1 while the device keeps processors awake.", "awake"),
        ("sealed", "1 if pages leave the device's process sealed.", "sealed"),
    ),
    *_each(
        "gauge",
        _far,
        ("far_bytes", "Size of the range for far memory.", "bytes"),
        ("far_used_bytes", "Far memory that processes have.", "used_bytes"),
        ("far_processes", "Processes with far memory.", "processes"),
    ),
    *_pages_and_bytes(
        "far_pages_out_total",
        "far_out_bytes_total",
        "moved out of jobs to far memory",
        partial(_far_count, "pages_out"),
    ),
    *_pages_and_bytes(
        "far_pages_in_total",
        "far_in_bytes_total",
        "brought back to jobs from far memory",
        partial(_far_count, "pages_in"),
    ),
    _counter(
        "far_fetches_total",
        "Fetches of far memory, by size.",
        _far_by({"block": "fetches", "part": "small_fetches"}),
        "size",
        notes="`block`: 2 MiB; `part`: fewer pages of one.",
    ),
    _counter(
        "far_fetch_wait_seconds_total",
        "Time that threads of jobs waited for far memory.",
        _far_count("fetch_wait_ns", 1e-9),
    ),
    _counter(
        "far_room_waits_total",
        "Waits of jobs' threads until other pages had left.",
        _far_count("room_waits"),
    ),
    _counter(
        "far_room_wait_seconds_total",
        "Time that threads of jobs waited until other pages had left.",
        _far_count("room_wait_ns", 1e-9),
    ),
    _counter(
        "far_pauses_total",
        "Times that far memory left a process to the kernel's swap, as it touched pages at random.",
        _far_count("pauses"),
    ),
    _counter(
        "far_pause_seconds_total",
        "Time that far memory left processes to the kernel's swap.",
        _far_count("pause_ns", 1e-9),
    ),
    _counter("far_lost_pages_total", "Pages of far memory lost.", _far_count("pages_lost")),
    _counter(
        "far_handed_back_pages_total",
        "Pages of far memory that became the kernel's again, by reason.",
        _far_by(_FAR_BACK),
        "reason",
        notes="What the program did with them, such as `fork`, `locked` (mlock) or `protected` "
        "(mprotect); `pinned`: the kernel did not move them.",
    ),
    _counter(
        "far_refused_processes_total",
        "Processes whose memory is never far, by reason.",
        _far_by(_FAR_OFF),
        "reason",
        notes="What they lack, such as `permission` (userfaultfd) or `addresses` (RLIMIT_AS).",
    ),
    *_each(
        "gauge",
        _status_length,
        ("runs", "Jobs of `infiniswap run` that use the device.", "runs"),
        ("alarms", "Alarms that `infiniswap status` shows.", "alarms"),
        ("degraded", "Measures that this host refuses the device.", "degraded"),
    ),
    _gauge(
        "slabs",
        "Slabs by state.",
        _status("slabs"),
        "state",
        notes="`unmapped`, `mapped`, `suspended` (its donor is unreachable) or `draining`.",
    ),
    _counter(
        "requests_total",
        "Requests to the front end, by operation.",
        _engine_by({op: f"{op}_requests" for op in _OPS}),
        "op",
    ),
    _histogram(
        "request_duration_seconds",
        "Duration of requests at the front end.",
        _latency({(op,): f"{op}_latency" for op in ("read", "write")}),
        "op",
        notes="A page fault waits for a `read`.",
    ),
    _histogram(
        "waited_read_duration_seconds",
        "Duration of reads at the front end that waited for a donor or the disk.",
        _latency({(): "waited_read_latency"}),
        notes="Others were ready: read ahead, in staging, or zeros.",
    ),
    *_pages_and_bytes(
        "pages_in_total",
        "in_bytes_total",
        "read from the device, by who had them",
        partial(_engine_by, _SOURCES),
        "source",
        notes="`remote` (a donor), `staging`, `backup` (the disk) or `zero` (never written).",
    ),
    *_pages_and_bytes(
        "pages_out_total", "out_bytes_total", "written to the device", partial(_engine, "pages_out")
    ),
    *_pages_and_bytes(
        "stored_pages_total",
        "stored_bytes_total",
        "stored for the device, by where",
        partial(_engine_by, _TARGETS),
        "target",
        notes="`remote`: acknowledged by a donor; `backup`: written to the disk.",
    ),
    _counter(
        "fallback_pages_total",
        "Pages read from the backup, by why no donor gave them.",
        _engine_by({why: f"fallback_{why}" for why in _FALLBACKS}),
        "reason",
        notes="`unmapped`: the slab has no donor; `suspended`: its donor is unreachable; "
        "`invalid`: the page is not there (yet); `error`: the donor failed, or its bytes did; "
        "`slow`: the donor takes too long; `quicker`: the donor has the page, but the disk was "
        "expected to answer sooner; `measured`: the read shows how quick the disk is now.",
    ),
    _histogram(
        "transfer_duration_seconds",
        "Duration of transfers to or from donors and the backup, copies included.",
        _latency(
            {(to, op): f"{to}_{op}_latency" for op in ("read", "write") for to in _TARGETS},
        ),
        *("target", "op"),
        notes="A transfer is of one page or more.",
    ),
    _gauge(
        "backup_expected_seconds",
        "How long a read of one page from the backup would take now; 0 before the first.",
        _engine("backup_expected_ns", 1e-9),
        notes="Compared with the donor's to choose between the two.",
    ),
    *_each(
        "gauge",
        _engine,
        ("requests_in_flight", "Requests that are not answered yet.", "requests_in_flight"),
        ("staging_pages", "Staging buffers, of a page each.", "staging_pages"),
        ("staging_used_pages", "Staging buffers in use.", "staging_pages_used"),
        ("backup_failing_pages", "Pages that the backup refuses for now.", "backup_failing"),
    ),
    *_each(
        "counter",
        _engine,
        ("requests_failed_total", "Requests answered with an error.", "requests_failed"),
        ("staging_waits_total", "Writes that had to wait for a buffer.", "staging_waits"),
        ("superseded_pages_total", "Backup writes saved by newer data.", "pages_out_superseded"),
        ("backup_writes_total", "Writes to the backup, after merging.", "backup_write_requests"),
        ("hedged_reads_total", "Slow reads, sent to a second source.", "hedged_reads"),
        ("hedged_reads_won_total", "Hedged reads that the second source won.", "hedged_wins"),
        ("read_ahead_pages_total", "Pages read from a donor in advance.", "pages_ahead"),
        (
            "read_ahead_used_pages_total",
            "Pages read in advance that were asked for later.",
            "pages_ahead_used",
        ),
        (
            "read_ahead_wasted_pages_total",
            "Pages read in advance in vain: changed since then, or asked for by nobody.",
            "pages_ahead_wasted",
        ),
        (
            "copies_dropped_pages_total",
            "Copies overtaken by a write, or failed.",
            "pages_copy_dropped",
        ),
    ),
    _counter(
        "copied_pages_total",
        "Pages copied in the background.",
        _engine_by({"refill": "pages_copied", "migration": "pages_migrated"}),
        "kind",
        notes="`refill`: from the backup to a slab's new donor; `migration`: from donor to donor.",
    ),
    _counter(
        "errors_total",
        "Errors that the device recovered from.",
        _engine_by(_ERRORS),
        "kind",
        notes="`remote`, `backup`: a transfer failed; `remote_crc`, `backup_crc`: a page came back "
        "with other bytes; `event_dropped`: the control loop was too slow, and has looked at "
        "everything again.",
    ),
    *_each(
        "counter",
        _slab_counts,
        ("lost_pages_total", "Pages lost with donors, as there was no backup.", "lost_pages"),
        ("slabs_mapped_total", "Slabs that got a donor.", "mapped"),
        ("slabs_remapped_total", "Slabs that got a donor after they had lost one.", "remapped"),
        ("slabs_migrated_total", "Slabs moved whole from donor to donor.", "moved"),
        ("slabs_evicted_total", "Slabs that donors took back.", "evicted"),
        ("slabs_returned_total", "Empty slabs that the device gave back.", "returned"),
    ),
    _gauge("donor_slabs", "Slabs on a donor.", _donors("slabs"), "donor"),
    _gauge(
        "donor_suspended",
        "1 while the connections to a donor are lost and it may come back.",
        lambda s: {row.address: row.state == "suspended" for row in s.status.donors},
        "donor",
    ),
    _gauge(
        "donor_connected",
        "1 for the transport by which pages go to a donor now.",
        lambda s: {
            (row.address, transport): row.state == "mapped" and row.transport == transport
            for row in s.status.donors
            for transport in TRANSPORT_NAMES
        },
        *_DONOR,
        notes="`tcp` or `rdma`.",
    ),
    *_pages_and_bytes(
        "donor_read_pages_total",
        "donor_read_bytes_total",
        "read from a donor, copies included",
        partial(_by_transport, 0),
        *_DONOR,
    ),
    *_pages_and_bytes(
        "donor_written_pages_total",
        "donor_written_bytes_total",
        "written to a donor, copies included",
        partial(_by_transport, 1),
        *_DONOR,
    ),
    _gauge(
        "donor_read_tail_seconds",
        "Duration that 99 of 100 recent reads from a donor stayed below.",
        lambda s: {row.address: row.read_tail_us / 1e6 for row in s.status.donors},
        "donor",
    ),
    _gauge(
        "donor_expected_seconds",
        "How long a read of one page from a donor would take now; 0 before the first.",
        lambda s: {row.address: row.expected_us / 1e6 for row in s.status.donors},
        "donor",
    ),
    *_each(
        "counter",
        _donors,
        ("donor_errors_total", "Transfers to or from a donor that failed.", "errors"),
        ("donor_rdma_fallbacks_total", "Uses of TCP where RDMA was wanted.", "rdma_fallbacks"),
        ("donor_rdma_probes_total", "Searches for RDMA while TCP was in use.", "rdma_probes"),
        labels=("donor",),
    ),
    *_each(
        "counter",
        _links,
        (
            "donor_connections_lost_total",
            "Losses of all connections to a donor.",
            "connections_lost",
        ),
        ("donor_reclaimed_total", "Leases got back after a loss of connections.", "reclaimed"),
        ("donor_given_up_total", "Leases given up as the donor did not return.", "given_up"),
        labels=("donor",),
    ),
    _counter(
        "donor_sessions_broken_total",
        "Control sessions that the device ended for what the donor said in them.",
        lambda s: {
            (address, reason): counts.sessions_broken[reason]
            for address, counts in s.links.items()
            for reason in _BROKEN
        },
        *("donor", "reason"),
        notes="`flood` or `protocol`.",
    ),
    _gauge(
        "standby_ready",
        "1 while another process is ready to take over.",
        lambda s: s.status.succession is not None and s.status.succession.standby == "ready",
    ),
    _counter(
        "take_overs_total",
        "Processes of the device that ended and were followed by another.",
        lambda s: 0 if s.status.succession is None else s.status.succession.take_overs,
    ),
    _counter(
        "memory_stalled_seconds_total",
        "Time in which tasks of this host waited for memory (PSI).",
        lambda _: memory_stalls(),
        "kind",
        notes="`some`: at least one task waited; `full`: all of them at once.",
    ),
)


def values(snapshot: DeviceSnapshot) -> Figures:
    """All values at the moment of the snapshot."""
    return figures(METRICS, snapshot, device=snapshot.status.name)
