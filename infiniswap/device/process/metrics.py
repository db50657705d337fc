# SPDX-License-Identifier: Apache-2.0
"""A device's metrics: which there are, and their values from one snapshot. docs/metrics.md lists
them; a test compares both."""

from __future__ import annotations

from typing import Final

from infiniswap import __version__
from infiniswap.control.figures import Figures, Metric, histogram
from infiniswap.control.messages import GOODBYE_FLOOD, GOODBYE_PROTOCOL
from infiniswap.device.api import DeviceStatus, DonorRow
from infiniswap.device.process.report import Snapshot
from infiniswap.system.pressure import memory_stalls
from infiniswap.units import PAGE_BYTES

_P: Final = "infiniswap_device_"

METRICS: Final = (
    Metric("infiniswap_device_info", "gauge", "Always 1.", ("version", "frontend", "path")),
    Metric(
        "infiniswap_device_start_time_seconds",
        "gauge",
        "When this process began to serve, Unix time.",
    ),
    Metric("infiniswap_device_size_bytes", "gauge", "Of the device."),
    Metric("infiniswap_device_slab_bytes", "gauge", "Of a slab."),
    Metric("infiniswap_device_swap_active", "gauge", "1: it is swap space."),
    Metric("infiniswap_device_swap_used_bytes", "gauge", "Swapped out there."),
    Metric("infiniswap_device_runs", "gauge", "Jobs of `infiniswap run` that use it."),
    Metric("infiniswap_device_slabs", "gauge", "Slabs by state.", ("state",)),
    Metric("infiniswap_device_remote_valid_pages", "gauge", "Pages with a valid copy on a donor."),
    Metric("infiniswap_device_requests_total", "counter", "Requests of the front end.", ("op",)),
    Metric("infiniswap_device_requests_in_flight", "gauge", "Requests not answered yet."),
    Metric(
        "infiniswap_device_requests_failed_total", "counter", "Requests answered with an error."
    ),
    Metric(
        "infiniswap_device_request_duration_seconds",
        "histogram",
        "Of requests, at the front end.",
        ("op",),
    ),
    Metric(
        "infiniswap_device_pages_in_total", "counter", "Pages read, by who had them.", ("source",)
    ),
    Metric("infiniswap_device_in_bytes_total", "counter", "The same in bytes.", ("source",)),
    Metric("infiniswap_device_pages_out_total", "counter", "Pages written to the device."),
    Metric("infiniswap_device_out_bytes_total", "counter", "The same in bytes."),
    Metric(
        "infiniswap_device_stored_pages_total",
        "counter",
        "Pages written on, by where to.",
        ("target",),
    ),
    Metric("infiniswap_device_stored_bytes_total", "counter", "The same in bytes.", ("target",)),
    Metric(
        "infiniswap_device_superseded_pages_total",
        "counter",
        "Backup writes that newer data made needless.",
    ),
    Metric(
        "infiniswap_device_backup_writes_total", "counter", "Writes to the backup, after merging."
    ),
    Metric(
        "infiniswap_device_fallback_pages_total",
        "counter",
        "Pages read from the backup, by why not from a donor.",
        ("reason",),
    ),
    Metric(
        "infiniswap_device_transfer_duration_seconds",
        "histogram",
        "Of transfers of one page or more to or from donors and the backup, copies too.",
        ("target", "op"),
    ),
    Metric(
        "infiniswap_device_hedged_reads_total",
        "counter",
        "Reads of a slow donor, also read from the backup.",
    ),
    Metric(
        "infiniswap_device_hedged_reads_won_total", "counter", "Those where the backup was faster."
    ),
    Metric(
        "infiniswap_device_copied_pages_total",
        "counter",
        "Pages copied in the background.",
        ("kind",),
    ),
    Metric(
        "infiniswap_device_copies_dropped_pages_total",
        "counter",
        "Copies overtaken by a write or failed.",
    ),
    Metric("infiniswap_device_staging_pages", "gauge", "Staging buffers, of a page each."),
    Metric("infiniswap_device_staging_used_pages", "gauge", "Those in use."),
    Metric("infiniswap_device_staging_waits_total", "counter", "Writes that had to wait for one."),
    Metric(
        "infiniswap_device_backup_failing_pages", "gauge", "Pages that the backup refuses; retried."
    ),
    Metric("infiniswap_device_errors_total", "counter", "Errors that were dealt with.", ("kind",)),
    Metric(
        "infiniswap_device_lost_pages_total",
        "counter",
        "Pages lost with donors; without a backup only.",
    ),
    Metric("infiniswap_device_slabs_mapped_total", "counter", "Slabs that got a donor."),
    Metric("infiniswap_device_slabs_remapped_total", "counter", "Those of them that had lost one."),
    Metric(
        "infiniswap_device_slabs_migrated_total",
        "counter",
        "Slabs moved whole from donor to donor.",
    ),
    Metric("infiniswap_device_slabs_evicted_total", "counter", "Slabs that donors took back."),
    Metric(
        "infiniswap_device_slabs_returned_total", "counter", "Empty slabs that were given back."
    ),
    Metric("infiniswap_device_donor_slabs", "gauge", "Slabs that a donor has.", ("donor",)),
    Metric(
        "infiniswap_device_donor_suspended",
        "gauge",
        "1: a donor's connections are lost just now.",
        ("donor",),
    ),
    Metric(
        "infiniswap_device_donor_connected",
        "gauge",
        "How pages go to a donor now.",
        ("donor", "transport"),
    ),
    Metric(
        "infiniswap_device_donor_read_pages_total",
        "counter",
        "Pages that a donor gave, copies too.",
        ("donor", "transport"),
    ),
    Metric(
        "infiniswap_device_donor_read_bytes_total",
        "counter",
        "The same in bytes.",
        ("donor", "transport"),
    ),
    Metric(
        "infiniswap_device_donor_written_pages_total",
        "counter",
        "Pages that a donor took, copies too.",
        ("donor", "transport"),
    ),
    Metric(
        "infiniswap_device_donor_written_bytes_total",
        "counter",
        "The same in bytes.",
        ("donor", "transport"),
    ),
    Metric("infiniswap_device_donor_errors_total", "counter", "Transfers that failed.", ("donor",)),
    Metric(
        "infiniswap_device_donor_read_tail_seconds",
        "gauge",
        "99 of 100 reads of late took less.",
        ("donor",),
    ),
    Metric(
        "infiniswap_device_donor_connections_lost_total",
        "counter",
        "Losses of all of them.",
        ("donor",),
    ),
    Metric(
        "infiniswap_device_donor_reclaimed_total",
        "counter",
        "Leases got back after that.",
        ("donor",),
    ),
    Metric(
        "infiniswap_device_donor_given_up_total", "counter", "Leases that were not.", ("donor",)
    ),
    Metric(
        "infiniswap_device_donor_sessions_broken_total",
        "counter",
        "Control sessions that were ended for what the donor said in them.",
        ("donor", "reason"),
    ),
    Metric(
        "infiniswap_device_donor_rdma_fallbacks_total",
        "counter",
        "TCP used where RDMA was wished.",
        ("donor",),
    ),
    Metric(
        "infiniswap_device_donor_rdma_probes_total",
        "counter",
        "RDMA looked for while TCP was used.",
        ("donor",),
    ),
    Metric("infiniswap_device_alarms", "gauge", "What `infiniswap status` shows as alarms."),
    Metric("infiniswap_device_degraded", "gauge", "What this host refuses the device."),
    Metric("infiniswap_device_processors_awake", "gauge", "1: it keeps processors awake now."),
    Metric("infiniswap_device_standby_ready", "gauge", "1: another process would take over."),
    Metric(
        "infiniswap_device_take_overs_total",
        "counter",
        "Processes that ended and were followed by one.",
    ),
    Metric(
        "infiniswap_device_memory_stalled_seconds_total",
        "counter",
        "Time in which tasks of this host waited for memory (PSI).",
        ("kind",),
    ),
)

_BY_LABEL: Final = {
    "requests_total": {
        "read": "read_requests",
        "write": "write_requests",
        "trim": "trim_requests",
        "zero": "zero_requests",
        "flush": "flush_requests",
    },
    "pages_in_total": {
        "remote": "pages_in_remote",
        "staging": "pages_in_staging",
        "backup": "pages_in_backup",
        "zero": "pages_in_zero",
    },
    "stored_pages_total": {"remote": "pages_out_remote", "backup": "pages_out_backup"},
    "fallback_pages_total": {
        "unmapped": "fallback_unmapped",
        "suspended": "fallback_suspended",
        "invalid": "fallback_invalid",
        "error": "fallback_error",
        "slow": "fallback_slow",
    },
    "copied_pages_total": {"refill": "pages_copied", "migration": "pages_migrated"},
    "errors_total": {
        "remote": "remote_errors",
        "remote_crc": "crc_errors_remote",
        "backup": "backup_errors",
        "backup_crc": "crc_errors_backup",
        "event_dropped": "events_dropped",
    },
}
"""Of struct isw_engine_stats, by metric and value of its label."""

_PLAIN: Final = {
    "requests_in_flight": "requests_in_flight",
    "requests_failed_total": "requests_failed",
    "pages_out_total": "pages_out",
    "superseded_pages_total": "pages_out_superseded",
    "backup_writes_total": "backup_write_requests",
    "hedged_reads_total": "hedged_reads",
    "hedged_reads_won_total": "hedged_wins",
    "copies_dropped_pages_total": "pages_copy_dropped",
    "staging_pages": "staging_pages",
    "staging_used_pages": "staging_pages_used",
    "staging_waits_total": "staging_waits",
    "backup_failing_pages": "backup_failing",
}
"""Likewise, without a label."""

_IN_BYTES: Final = {
    "pages_in_total": "in_bytes_total",
    "stored_pages_total": "stored_bytes_total",
}

_SLABS: Final = {
    "slabs_mapped_total": "mapped",
    "slabs_remapped_total": "remapped",
    "slabs_migrated_total": "moved",
    "slabs_evicted_total": "evicted",
    "slabs_returned_total": "returned",
    "lost_pages_total": "lost_pages",
}
"""Of SlabCounts."""


def figures(snapshot: Snapshot, started_s: float) -> Figures:
    """The values.

    Args:
        snapshot: of the device.
        started_s: when the process began to serve, Unix time.
    """
    status = snapshot.status
    out = Figures(METRICS, {"device": status.name})
    _engine(out, snapshot)
    _device(out, status, started_s)
    for row in status.donors:
        _donor(out, row)
    for kind, stalled_s in memory_stalls().items():
        out.set(_P + "memory_stalled_seconds_total", stalled_s, kind)
    return out


def _engine(out: Figures, snapshot: Snapshot) -> None:
    counts, latency = snapshot.figures.counts, snapshot.figures.latency
    for name, fields in _BY_LABEL.items():
        for label, field in fields.items():
            out.set(_P + name, counts[field], label)
            if name in _IN_BYTES:
                out.set(_P + _IN_BYTES[name], counts[field] * PAGE_BYTES, label)
    for name, field in _PLAIN.items():
        out.set(_P + name, counts[field])
    out.set(_P + "out_bytes_total", counts["pages_out"] * PAGE_BYTES)
    bounds_ns = snapshot.figures.latency_bounds_ns
    for op in ("read", "write"):
        value = histogram(latency[f"{op}_latency"], bounds_ns)
        out.set(_P + "request_duration_seconds", value, op)
        for target in ("remote", "backup"):
            value = histogram(latency[f"{target}_{op}_latency"], bounds_ns)
            out.set(_P + "transfer_duration_seconds", value, target, op)


def _device(out: Figures, status: DeviceStatus, started_s: float) -> None:
    out.set(_P + "info", 1, __version__, status.frontend, status.path)
    for name, value in (
        ("start_time_seconds", started_s),
        ("size_bytes", status.size_bytes),
        ("slab_bytes", status.slab_bytes),
        ("swap_active", status.swap.active),
        ("swap_used_bytes", status.swap.used_bytes),
        ("runs", len(status.runs)),
        ("remote_valid_pages", status.pages_on_donors),
        ("alarms", len(status.alarms)),
        ("degraded", len(status.degraded)),
        ("processors_awake", status.awake),
    ):
        out.set(_P + name, value)
    for state, count in status.slabs.items():
        out.set(_P + "slabs", count, state)
    for name, key in _SLABS.items():
        out.set(_P + name, status.slab_counts[key])
    succession = status.succession
    out.set(_P + "standby_ready", succession is not None and succession.standby == "ready")
    out.set(_P + "take_overs_total", 0 if succession is None else succession.take_overs)


def _donor(out: Figures, row: DonorRow) -> None:
    for name, value in (
        ("slabs", row.slabs),
        ("suspended", row.state == "suspended"),
        ("errors_total", row.errors),
        ("read_tail_seconds", row.read_tail_us / 1e6),
        ("connections_lost_total", row.connections_lost),
        ("reclaimed_total", row.reclaimed),
        ("given_up_total", row.given_up),
        ("rdma_fallbacks_total", row.rdma_fallbacks),
        ("rdma_probes_total", row.rdma_probes),
    ):
        out.set(f"{_P}donor_{name}", value, row.address)
    for reason in (GOODBYE_FLOOD, GOODBYE_PROTOCOL):
        count = row.sessions_broken.get(reason, 0)
        out.set(_P + "donor_sessions_broken_total", count, row.address, reason)
    connected = row.state == "mapped"
    for transport, read, written in (
        ("tcp", row.read_pages - row.rdma_read_pages, row.write_pages - row.rdma_write_pages),
        ("rdma", row.rdma_read_pages, row.rdma_write_pages),
    ):
        labels = (row.address, transport)
        out.set(_P + "donor_connected", connected and row.transport == transport, *labels)
        for word, pages in (("read", read), ("written", written)):
            out.set(f"{_P}donor_{word}_pages_total", pages, *labels)
            out.set(f"{_P}donor_{word}_bytes_total", pages * PAGE_BYTES, *labels)
