# SPDX-License-Identifier: Apache-2.0
"""A donor's metrics: which there are, and their values from one snapshot. docs/metrics.md lists
them; a test compares both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from infiniswap.control import messages as m
from infiniswap.control.figures import Figures, Metric
from infiniswap.donor.leases import LeaseState
from infiniswap.donor.report import DonorSnapshot
from infiniswap.system.pressure import memory_stalls

_P: Final = "infiniswap_donor_"
_LEASE: Final = ("lease", "device", "host")

METRICS: Final = (
    Metric("infiniswap_donor_info", "gauge", "Always 1.", ("version", "name", "donor_id")),
    Metric(
        "infiniswap_donor_start_time_seconds", "gauge", "When the daemon was started, Unix time."
    ),
    Metric("infiniswap_donor_slab_bytes", "gauge", "Of a slab."),
    Metric("infiniswap_donor_pool_limit_bytes", "gauge", "Most memory ever lent."),
    Metric("infiniswap_donor_pool_slabs", "gauge", "Slabs of the pool by state.", ("state",)),
    Metric("infiniswap_donor_pool_unpinned_slabs", "gauge", "Slabs that this host may swap out."),
    Metric("infiniswap_donor_pool_mappable_slabs", "gauge", "Slabs that could be lent now."),
    Metric("infiniswap_donor_memory_total_bytes", "gauge", "Memory of the host, or of its cgroup."),
    Metric(
        "infiniswap_donor_memory_available_bytes", "gauge", "What programs could still get of it."
    ),
    Metric("infiniswap_donor_memory_headroom_bytes", "gauge", "What is to be kept free."),
    Metric(
        "infiniswap_donor_memory_others_bytes", "gauge", "Average use of everything but the pool."
    ),
    Metric("infiniswap_donor_memory_cache_bytes", "gauge", "Page cache that counts as used."),
    Metric("infiniswap_donor_memory_used_ratio", "gauge", "Share of memory that cannot be lent."),
    Metric("infiniswap_donor_memory_short", "gauge", "1: lent slabs have to be taken back."),
    Metric(
        "infiniswap_donor_memory_stalled_seconds_total",
        "counter",
        "Time in which tasks of this host waited for memory (PSI).",
        ("kind",),
    ),
    Metric("infiniswap_donor_shortages_total", "counter", "How often memory became short."),
    Metric("infiniswap_donor_draining", "gauge", "1: it takes every slab back and lends none."),
    Metric("infiniswap_donor_degraded", "gauge", "What this host refuses the daemon."),
    Metric("infiniswap_donor_sessions", "gauge", "Devices with a control session."),
    Metric("infiniswap_donor_leases", "gauge", "Leases by state.", ("state",)),
    Metric("infiniswap_donor_connections", "gauge", "Data connections.", ("transport",)),
    Metric("infiniswap_donor_requests_total", "counter", "Requests for pages, over TCP.", ("op",)),
    Metric("infiniswap_donor_read_bytes_total", "counter", "Pages that devices read, over TCP."),
    Metric(
        "infiniswap_donor_written_bytes_total", "counter", "Pages that devices wrote, over TCP."
    ),
    Metric("infiniswap_donor_rdma_regions", "gauge", "Slabs that devices reach by RDMA."),
    Metric("infiniswap_donor_rdma_ahead", "gauge", "Slabs that are registered for nobody yet."),
    Metric("infiniswap_donor_lease_slabs", "gauge", "Slabs lent under a lease.", _LEASE),
    Metric(
        "infiniswap_donor_lease_read_bytes_total", "counter", "Pages read there, over TCP.", _LEASE
    ),
    Metric(
        "infiniswap_donor_lease_written_bytes_total",
        "counter",
        "Pages written there, over TCP.",
        _LEASE,
    ),
    Metric("infiniswap_donor_slabs_allocated_total", "counter", "Slabs added to the pool."),
    Metric("infiniswap_donor_slabs_released_total", "counter", "Slabs given back to the host."),
    Metric(
        "infiniswap_donor_evictions_total", "counter", "Slabs taken back from devices.", ("how",)
    ),
    Metric("infiniswap_donor_evictions_refused_total", "counter", "Slabs kept, as the only copy."),
    Metric("infiniswap_donor_eviction_batches_total", "counter", "Batches of evictions."),
    Metric(
        "infiniswap_donor_leases_expired_total",
        "counter",
        "Leases whose device did not come back in time, or had no session for an hour.",
    ),
    Metric("infiniswap_donor_leases_restored_total", "counter", "Leases of before a restart."),
    Metric("infiniswap_donor_control_requests_total", "counter", "Requests of devices.", ("type",)),
    Metric(
        "infiniswap_donor_control_refused_total",
        "counter",
        "Requests of devices that were refused, by reason.",
        ("reason",),
    ),
    Metric(
        "infiniswap_donor_sessions_opened_total", "counter", "Control sessions that were opened."
    ),
    Metric("infiniswap_donor_sessions_ended_total", "counter", "And how they ended.", ("reason",)),
    Metric(
        "infiniswap_donor_handshakes_ended_total", "counter", "By the device, and why.", ("reason",)
    ),
    Metric("infiniswap_donor_rdma_opened_total", "counter", "Leases that got RDMA connections."),
    Metric(
        "infiniswap_donor_rdma_registered_ahead_total",
        "counter",
        "Slabs that were registered before anybody waited for it.",
    ),
    Metric(
        "infiniswap_donor_errors_total", "counter", "What went wrong or was turned away.", ("kind",)
    ),
)

_SERVICE: Final = {
    "eviction_batches": "eviction_batches_total",
    "evictions_refused": "evictions_refused_total",
    "leases_expired": "leases_expired_total",
    "leases_restored": "leases_restored_total",
    "rdma_opened": "rdma_opened_total",
    "rdma_registered_ahead": "rdma_registered_ahead_total",
}
_HARVEST: Final = {
    "slabs_allocated": "slabs_allocated_total",
    "slabs_released": "slabs_released_total",
    "shortages": "shortages_total",
}
_SERVICE_ERRORS: Final = (
    "activity_unanswered",
    "lease_errors",
    "maps_refused",
    "rdma_refused",
    "rdma_unregistered",
    "records_failed",
)
_HARVEST_ERRORS: Final = ("clock_jumps", "figures_refused", "harvest_errors", "slabs_refused")
_SERVER_ERRORS: Final = (
    "answers_unawaited",
    "connections_idle_closed",
    "connections_refused",
    "http_errors",
    "http_unauthorized",
    "log_lines_suppressed",
    "protocol_errors",
    "secret_errors",
    "sessions_refused",
)
_STORE_ERRORS: Final = {
    "connections_refused": "data_connections_refused",
    "protocol_errors": "data_protocol_errors",
    "request_errors": "request_errors",
    "rdma_failures": "rdma_failures",
}
_TAGS: Final = ("memory", "lease", "map", "unmap", "renew", "release", "rdma")
_OTHER: Final = "other"


def figures(snapshot: DonorSnapshot, started_s: float) -> Figures:
    """The values.

    Args:
        snapshot: of the donor.
        started_s: when the daemon was started, Unix time.
    """
    out = Figures(METRICS)
    status, pool, memory = snapshot.status, snapshot.status.pool, snapshot.status.memory
    out.set(_P + "info", 1, status.software, status.donor_name, status.donor_id)
    for name, value in (
        ("start_time_seconds", started_s),
        ("slab_bytes", status.slab_bytes),
        ("pool_limit_bytes", pool.limit_bytes),
        ("pool_unpinned_slabs", pool.slabs_unpinned),
        ("pool_mappable_slabs", pool.can_map),
        ("memory_total_bytes", memory.total_bytes),
        ("memory_available_bytes", memory.available_bytes),
        ("memory_headroom_bytes", memory.headroom_bytes),
        ("memory_others_bytes", memory.others_bytes),
        ("memory_cache_bytes", memory.cache_bytes),
        ("memory_used_ratio", memory.used_share),
        ("memory_short", snapshot.is_short),
        ("draining", status.draining),
        ("degraded", len(status.degraded)),
        ("sessions", status.sessions),
    ):
        out.set(_P + name, value)
    for state, count in (
        ("free", pool.slabs_free),
        ("mapped", pool.slabs_mapped),
        ("dirty", pool.slabs_dirty),
    ):
        out.set(_P + "pool_slabs", count, state)
    for kind, stalled_s in memory_stalls().items():
        out.set(_P + "memory_stalled_seconds_total", stalled_s, kind)
    _store(out, snapshot.stats)
    _leases(out, status)
    _counters(out, snapshot)
    return out


def _store(out: Figures, stats: Mapping[str, int]) -> None:
    out.set(_P + "connections", stats["connections"], "tcp")
    out.set(_P + "connections", stats["rdma_connections"], "rdma")
    out.set(_P + "rdma_regions", stats["rdma_regions"])
    out.set(_P + "rdma_ahead", stats["rdma_ahead"])
    for op in ("read", "write"):
        out.set(_P + "requests_total", stats[f"{op}_requests"], op)
    out.set(_P + "read_bytes_total", stats["read_bytes"])
    out.set(_P + "written_bytes_total", stats["write_bytes"])
    for field, kind in _STORE_ERRORS.items():
        out.set(_P + "errors_total", stats[field], kind)


def _leases(out: Figures, status: m.Status) -> None:
    states = Counter(lease.state for lease in status.leases)
    for state in LeaseState:
        out.set(_P + "leases", states[state.value], state.value)
    for lease in status.leases:
        # Texts of the device's: bounded, and without control characters (messages.Name).
        labels = (str(lease.lease), lease.device_name, lease.host_name)
        out.set(_P + "lease_slabs", lease.slots_mapped, *labels)
        out.set(_P + "lease_read_bytes_total", lease.read_bytes, *labels)
        out.set(_P + "lease_written_bytes_total", lease.write_bytes, *labels)


def _counters(out: Figures, snapshot: DonorSnapshot) -> None:
    service, harvest, server = snapshot.service, snapshot.harvest, snapshot.server
    for names, counter in ((_SERVICE, service), (_HARVEST, harvest)):
        for key, name in names.items():
            out.set(_P + name, counter[key])
    forced = service["evictions_forced"]
    out.set(_P + "evictions_total", forced, "forced")
    out.set(_P + "evictions_total", service["evictions"] - forced, "agreed")
    for tag in _TAGS:
        out.set(_P + "control_requests_total", service[f"requests_{tag}"], tag)
    for reason in m.REFUSED_REASONS:
        out.set(_P + "control_refused_total", server[f"requests_refused_{reason}"], reason)
    out.set(_P + "sessions_opened_total", server["sessions_opened"])
    for reason in (*m.GOODBYE_REASONS, "lost", _OTHER):
        out.set(_P + "sessions_ended_total", server[f"sessions_ended_{reason}"], reason)
        out.set(_P + "handshakes_ended_total", server[f"handshakes_ended_{reason}"], reason)
    for kinds, counter in (
        (_SERVICE_ERRORS, service),
        (_HARVEST_ERRORS, harvest),
        (_SERVER_ERRORS, server),
    ):
        for kind in kinds:
            out.set(_P + "errors_total", counter[kind], kind)
