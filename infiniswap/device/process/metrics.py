# SPDX-License-Identifier: Apache-2.0
"""A device's metrics: each is declared here once, with the place that its values come from.

`make man` writes the table of docs/metrics.md from this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from infiniswap import __version__
from infiniswap.control.figures import (
    Figures,
    Kind,
    Metric,
    Value,
    Values,
    figures,
    histogram,
)
from infiniswap.control.messages import GOODBYE_FLOOD, GOODBYE_PROTOCOL
from infiniswap.device.api import DonorRow
from infiniswap.device.donors.counts import LinkCounts
from infiniswap.device.process.report import Snapshot
from infiniswap.system.pressure import memory_stalls
from infiniswap.units import PAGE_BYTES

Read = Callable[[Snapshot], Values]


def _engine(field: str, unit: int = 1) -> Read:
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


def _slabs(field: str) -> Read:
    """A field of SlabCounts."""
    return lambda s: s.status.slab_counts[field]


def _donors(read: Callable[[DonorRow], Value]) -> Read:
    """A value of each donor's row."""
    return lambda s: {row.address: read(row) for row in s.status.donors}


def _links(read: Callable[[LinkCounts], int]) -> Read:
    """A count of the link to each donor."""
    return lambda s: {address: read(counts) for address, counts in s.links.items()}


def _by_transport(pages: str, unit: int = 1) -> Read:
    """Pages of each donor by transport; `pages`: a field of DonorRow."""

    def values(s: Snapshot) -> Values:
        found: dict[tuple[str, ...], Value] = {}
        for row in s.status.donors:
            by_rdma = getattr(row, f"rdma_{pages}")
            found[row.address, "tcp"] = (getattr(row, pages) - by_rdma) * unit
            found[row.address, "rdma"] = by_rdma * unit
        return found

    return values


def _metric(
    kind: Kind, name: str, help_text: str, read: Read, *labels: str, notes: str = ""
) -> Metric[Snapshot]:
    return Metric(f"infiniswap_device_{name}", kind, help_text, read, labels, notes)


_gauge, _counter = partial(_metric, "gauge"), partial(_metric, "counter")
_histogram = partial(_metric, "histogram")


def _pages_and_bytes(
    in_pages: str,
    in_bytes: str,
    what: str,
    read: Callable[[int], Read],
    *labels: str,
    notes: str = "",
) -> tuple[Metric[Snapshot], Metric[Snapshot]]:
    """A counter of pages, and the same in bytes."""
    return (
        _counter(in_pages, f"Pages {what}.", read(1), *labels, notes=notes),
        _counter(in_bytes, f"Bytes {what}.", read(PAGE_BYTES), *labels),
    )


_SOURCES: Final = {
    "remote": "pages_in_remote",
    "staging": "pages_in_staging",
    "backup": "pages_in_backup",
    "zero": "pages_in_zero",
}
_TARGETS: Final = {"remote": "pages_out_remote", "backup": "pages_out_backup"}
_BROKEN: Final = (GOODBYE_FLOOD, GOODBYE_PROTOCOL)
_FALLBACKS: Final = ("unmapped", "suspended", "invalid", "error", "slow")
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
    _gauge("size_bytes", "Size of the device.", lambda s: s.status.size_bytes),
    _gauge("slab_bytes", "Size of a slab.", lambda s: s.status.slab_bytes),
    _gauge("swap_active", "1 while the device is swap space.", lambda s: s.status.swap.active),
    _gauge(
        "swap_used_bytes", "Memory swapped out to the device.", lambda s: s.status.swap.used_bytes
    ),
    _gauge("runs", "Jobs of `infiniswap run` that use the device.", lambda s: len(s.status.runs)),
    _gauge(
        "slabs",
        "Slabs by state.",
        lambda s: s.status.slabs,
        "state",
        notes="`unmapped`, `mapped`, `suspended` (its donor is unreachable) or `draining`.",
    ),
    _gauge(
        "remote_valid_pages",
        "Pages with a valid copy on a donor.",
        lambda s: s.status.pages_on_donors,
    ),
    _counter(
        "requests_total",
        "Requests to the front end, by operation.",
        _engine_by({op: f"{op}_requests" for op in ("read", "write", "trim", "zero", "flush")}),
        "op",
    ),
    _gauge(
        "requests_in_flight", "Requests that are not answered yet.", _engine("requests_in_flight")
    ),
    _counter(
        "requests_failed_total", "Requests answered with an error.", _engine("requests_failed")
    ),
    _histogram(
        "request_duration_seconds",
        "Duration of requests at the front end.",
        _latency({(op,): f"{op}_latency" for op in ("read", "write")}),
        "op",
        notes="A page fault waits for a `read`.",
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
        "superseded_pages_total",
        "Backup writes saved because newer data came first.",
        _engine("pages_out_superseded"),
    ),
    _counter(
        "backup_writes_total",
        "Writes to the backup, after merging.",
        _engine("backup_write_requests"),
    ),
    _counter(
        "fallback_pages_total",
        "Pages read from the backup, by why no donor gave them.",
        _engine_by({why: f"fallback_{why}" for why in _FALLBACKS}),
        "reason",
        notes="`unmapped`: the slab has no donor; `suspended`: its donor is unreachable; "
        "`invalid`: the page is not there (yet); `error`: the donor failed, or its bytes did; "
        "`slow`: the donor takes too long.",
    ),
    _histogram(
        "transfer_duration_seconds",
        "Duration of transfers to or from donors and the backup, copies included.",
        _latency(
            {
                (target, op): f"{target}_{op}_latency"
                for op in ("read", "write")
                for target in ("remote", "backup")
            }
        ),
        *("target", "op"),
        notes="A transfer is of one page or more.",
    ),
    _counter(
        "hedged_reads_total",
        "Reads from a slow donor that were also read from the backup.",
        _engine("hedged_reads"),
    ),
    _counter(
        "hedged_reads_won_total",
        "Reads from a slow donor that the backup answered first.",
        _engine("hedged_wins"),
    ),
    _counter(
        "copied_pages_total",
        "Pages copied in the background.",
        _engine_by({"refill": "pages_copied", "migration": "pages_migrated"}),
        "kind",
        notes="`refill`: from the backup to a slab's new donor; `migration`: from donor to donor.",
    ),
    _counter(
        "copies_dropped_pages_total",
        "Background copies of pages that a write overtook, or that failed.",
        _engine("pages_copy_dropped"),
    ),
    _gauge("staging_pages", "Staging buffers, of a page each.", _engine("staging_pages")),
    _gauge("staging_used_pages", "Staging buffers in use.", _engine("staging_pages_used")),
    _counter(
        "staging_waits_total",
        "Writes that had to wait for a staging buffer.",
        _engine("staging_waits"),
    ),
    _gauge(
        "backup_failing_pages",
        "Pages that the backup refuses and that are tried again.",
        _engine("backup_failing"),
    ),
    _counter(
        "errors_total",
        "Errors that the device recovered from.",
        _engine_by(
            {
                "remote": "remote_errors",
                "remote_crc": "crc_errors_remote",
                "backup": "backup_errors",
                "backup_crc": "crc_errors_backup",
                "event_dropped": "events_dropped",
            }
        ),
        "kind",
        notes="`remote`, `backup`: a transfer failed; `remote_crc`, `backup_crc`: a page came back "
        "with other bytes; `event_dropped`: the control loop was too slow, and has looked at "
        "everything again.",
    ),
    _counter(
        "lost_pages_total",
        "Pages lost together with donors.",
        _slabs("lost_pages"),
        notes="Only a device without a backup loses any.",
    ),
    _counter("slabs_mapped_total", "Slabs that got a donor.", _slabs("mapped")),
    _counter(
        "slabs_remapped_total",
        "Slabs that got a donor after they had lost one.",
        _slabs("remapped"),
    ),
    _counter("slabs_migrated_total", "Slabs moved whole from donor to donor.", _slabs("moved")),
    _counter("slabs_evicted_total", "Slabs that donors took back.", _slabs("evicted")),
    _counter("slabs_returned_total", "Empty slabs that the device gave back.", _slabs("returned")),
    _gauge("donor_slabs", "Slabs on a donor.", _donors(lambda row: row.slabs), "donor"),
    _gauge(
        "donor_suspended",
        "1 while the connections to a donor are lost and it may come back.",
        _donors(lambda row: row.state == "suspended"),
        "donor",
    ),
    _gauge(
        "donor_connected",
        "1 for the transport by which pages go to a donor now.",
        lambda s: {
            (row.address, transport): row.state == "mapped" and row.transport == transport
            for row in s.status.donors
            for transport in ("tcp", "rdma")
        },
        *_DONOR,
        notes="`tcp` or `rdma`.",
    ),
    *_pages_and_bytes(
        "donor_read_pages_total",
        "donor_read_bytes_total",
        "read from a donor, copies included",
        partial(_by_transport, "read_pages"),
        *_DONOR,
    ),
    *_pages_and_bytes(
        "donor_written_pages_total",
        "donor_written_bytes_total",
        "written to a donor, copies included",
        partial(_by_transport, "write_pages"),
        *_DONOR,
    ),
    _counter(
        "donor_errors_total",
        "Transfers to or from a donor that failed.",
        _donors(lambda row: row.errors),
        "donor",
    ),
    _gauge(
        "donor_read_tail_seconds",
        "Duration that 99 of 100 recent reads from a donor stayed below.",
        _donors(lambda row: row.read_tail_us / 1e6),
        "donor",
    ),
    _counter(
        "donor_connections_lost_total",
        "How often all connections to a donor were lost.",
        _links(lambda counts: counts.connections_lost),
        "donor",
    ),
    _counter(
        "donor_reclaimed_total",
        "Leases that a donor kept and gave back after its connections were lost.",
        _links(lambda counts: counts.reclaimed),
        "donor",
    ),
    _counter(
        "donor_given_up_total",
        "Leases given up because the donor did not return in time.",
        _links(lambda counts: counts.given_up),
        "donor",
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
    _counter(
        "donor_rdma_fallbacks_total",
        "How often the device used TCP for a donor although RDMA was wanted.",
        _donors(lambda row: row.rdma_fallbacks),
        "donor",
    ),
    _counter(
        "donor_rdma_probes_total",
        "How often the device looked for RDMA to a donor while it used TCP.",
        _donors(lambda row: row.rdma_probes),
        "donor",
    ),
    _gauge("alarms", "Alarms that `infiniswap status` shows.", lambda s: len(s.status.alarms)),
    _gauge(
        "degraded", "Measures that this host refuses the device.", lambda s: len(s.status.degraded)
    ),
    _gauge(
        "processors_awake", "1 while the device keeps processors awake.", lambda s: s.status.awake
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


def values(snapshot: Snapshot) -> Figures:
    """All values at the moment of the snapshot."""
    return figures(METRICS, snapshot, device=snapshot.status.name)
