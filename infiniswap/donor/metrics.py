# SPDX-License-Identifier: Apache-2.0
"""A donor's metrics: each is declared here once, with the place that its values come from.

`make man` writes the table of docs/metrics.md from this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Final

from infiniswap.control import messages as m
from infiniswap.control.figures import Declarer, Figures, Values, figures
from infiniswap.donor.leases import LeaseState
from infiniswap.donor.report import OF_THE_DATA_PORT, DonorSnapshot
from infiniswap.donor.requests import Requests
from infiniswap.system.pressure import memory_stalls

Read = Callable[[DonorSnapshot], Values]


def _status(field: str) -> Read:
    """A field of Status."""
    get = attrgetter(field)
    return lambda s: get(s.status)


def _store(field: str) -> Read:
    """A field of struct isw_store_stats."""
    return lambda s: s.stats[field]


def _store_by(**fields: str) -> Read:
    """Fields of struct isw_store_stats by the label's value."""
    return lambda s: {label: s.stats[field] for label, field in fields.items()}


def _service(key: str) -> Read:
    """A counter of the service."""
    return lambda s: s.service[key]


def _harvest(key: str) -> Read:
    """A counter of the harvester."""
    return lambda s: s.harvest[key]


def _server_by(prefix: str, labels: Iterable[str]) -> Read:
    """Counters of the control server by the label's value, which ends their names."""
    return lambda s: {label: s.server[prefix + label] for label in labels}


def _leases(field: str) -> Read:
    """A field of each LeaseStatus."""
    # Texts of the device's: bounded, and without control characters (messages.Name).
    return lambda s: {
        (str(lease.lease), lease.device_name, lease.host_name): getattr(lease, field)
        for lease in s.status.leases
    }


def _lease_states(s: DonorSnapshot) -> Values:
    states = Counter(lease.state for lease in s.status.leases)
    return {state.value: states[state.value] for state in LeaseState}


def _evictions(s: DonorSnapshot) -> Values:
    forced = s.service["evictions_forced"]
    return {"forced": forced, "agreed": s.service["evictions"] - forced}


def _errors(s: DonorSnapshot) -> Values:
    return dict(_each_error(s))


def _each_error(snapshot: DonorSnapshot) -> Iterator[tuple[str, int]]:
    for kind, field in _STORE_ERRORS.items():
        yield kind, snapshot.stats[field]
    for kinds, counters in (
        (_SERVICE_ERRORS, snapshot.service),
        (_HARVEST_ERRORS, snapshot.harvest),
        (_SERVER_ERRORS, snapshot.server),
    ):
        for kind in kinds:
            yield kind, counters[kind]


_declare = Declarer[DonorSnapshot]("infiniswap_donor_")
_gauge, _counter, _each = _declare.gauge, _declare.counter, _declare.each

_LEASE: Final = ("lease", "device", "host")
_TAGS: Final = [str(kind.__struct_config__.tag) for kind in (*Requests.AT_ONCE, *Requests.IN_TURN)]
_ENDS: Final = (*m.GOODBYE_REASONS, "lost", "other")
_SERVICE_ERRORS: Final = (
    "activity_unanswered",
    "lease_errors",
    "maps_refused",
    "rdma_refused",
    "rdma_unregistered",
    "records_failed",
    "slo_unmeasured",
)
_HARVEST_ERRORS: Final = ("clock_jumps", "figures_refused", "harvest_errors", "slabs_refused")
_SERVER_ERRORS: Final = (
    "answers_unawaited",
    "certificates_refused",
    "connections_displaced",
    "connections_idle_closed",
    "connections_plain",
    "connections_refused",
    "connections_unread_closed",
    "handshakes_limited",
    "http_errors",
    "http_unauthorized",
    "log_lines_suppressed",
    "pages_refused",
    "protocol_errors",
    "secret_errors",
    "sessions_refused",
)
_STORE_ERRORS: Final = {
    **{kind: name for name, kind in OF_THE_DATA_PORT.items()},
    "request_errors": "request_errors",
    "rdma_failures": "rdma_failures",
}

METRICS: Final = (
    _gauge(
        "info",
        "Always 1.",
        lambda s: {(s.status.software, s.status.donor_name, s.status.donor_id): 1},
        *("version", "name", "donor_id"),
    ),
    _gauge(
        "start_time_seconds",
        "When the daemon was started, in Unix time.",
        lambda s: s.started_unix_s,
    ),
    *_each(
        "gauge",
        _status,
        ("slab_bytes", "Size of a slab.", "slab_bytes"),
        ("pool_limit_bytes", "Most memory that is ever lent.", "pool.limit_bytes"),
        ("pool_unpinned_slabs", "Slabs that this host may swap out.", "pool.slabs_unpinned"),
        ("pool_mappable_slabs", "Slabs that could be lent now.", "pool.can_map"),
        ("memory_total_bytes", "Memory of the host, or of its cgroup.", "memory.total_bytes"),
        ("memory_available_bytes", "Memory that programs may get.", "memory.available_bytes"),
        ("memory_headroom_bytes", "Memory to be kept free.", "memory.headroom_bytes"),
        ("memory_others_bytes", "Average use by all but the pool.", "memory.others_bytes"),
        ("memory_cache_bytes", "Page cache that counts as used.", "memory.cache_bytes"),
        ("memory_used_ratio", "Share of memory that cannot be lent.", "memory.used_share"),
        ("draining", "1 while the daemon takes every slab back and lends none.", "draining"),
        ("sessions", "Devices with a control session.", "sessions"),
    ),
    _gauge(
        "pool_slabs",
        "Slabs of the pool by state.",
        _store_by(free="slabs_free", mapped="slabs_mapped", dirty="slabs_dirty"),
        "state",
        notes="`free` (ready), `mapped` (lent) or `dirty` (came back, not zeroed yet).",
    ),
    _gauge(
        "memory_short",
        "1 while lent slabs leave less memory free than the headroom.",
        lambda s: s.is_short,
        notes="The daemon then takes slabs back.",
    ),
    _counter(
        "memory_stalled_seconds_total",
        "Time in which tasks of this host waited for memory (PSI).",
        lambda _: memory_stalls(),
        "kind",
        notes="`some`: at least one task waited; `full`: all of them at once.",
    ),
    _gauge(
        "slo_ratio",
        "Latency of the service that this donor protects, as a share of its bound.",
        lambda s: s.slo.ratio if s.slo else 0,
        notes="0 before the first measurement, and where there is no "
        "[such service](configuration.md#protect-a-service-of-the-donors-host).",
    ),
    _gauge(
        "slo_held",
        "1 while this donor lends nothing more, to protect a service of its host.",
        lambda s: s.is_held,
    ),
    _gauge(
        "slo_blind",
        "1 while the latency of the service that this donor protects is unknown.",
        lambda s: s.slo.is_blind if s.slo else 0,
        notes="The donor then lends nothing more. `infiniswap status` shows the error.",
    ),
    _counter(
        "slo_returned_slabs_total",
        "Slabs taken back to protect a service of this host.",
        _service("slo_returned"),
    ),
    _gauge(
        "degraded",
        "Measures that this host refuses the daemon.",
        lambda s: len(s.status.degraded),
    ),
    _gauge(
        "leases",
        "Leases by state.",
        _lease_states,
        "state",
        notes="`active`, `grace` (the device is away) or `expired`.",
    ),
    _gauge(
        "connections",
        "Data connections.",
        _store_by(tcp="connections", rdma="rdma_connections"),
        "transport",
    ),
    _counter(
        "requests_total",
        "Requests for pages over TCP, by operation.",
        _store_by(read="read_requests", write="write_requests"),
        "op",
    ),
    *_each(
        "counter",
        _store,
        ("read_bytes_total", "Bytes that devices read over TCP.", "read_bytes"),
        ("written_bytes_total", "Bytes that devices wrote over TCP.", "write_bytes"),
    ),
    *_each(
        "gauge",
        _store,
        ("rdma_regions", "Slabs that devices reach by RDMA.", "rdma_regions"),
        ("rdma_ahead", "Slabs registered for RDMA before a device uses them.", "rdma_ahead"),
    ),
    _gauge("lease_slabs", "Slabs lent under a lease.", _leases("slots_mapped"), *_LEASE),
    *_each(
        "counter",
        _leases,
        ("lease_read_bytes_total", "Bytes that a lease's device read over TCP.", "read_bytes"),
        ("lease_written_bytes_total", "Bytes that a lease's device wrote over TCP.", "write_bytes"),
        labels=_LEASE,
    ),
    *_each(
        "counter",
        _harvest,
        ("shortages_total", "How often memory became short.", "shortages"),
        ("slabs_allocated_total", "Slabs added to the pool.", "slabs_allocated"),
        ("slabs_released_total", "Slabs given back to the host.", "slabs_released"),
    ),
    _counter(
        "evictions_total",
        "Slabs taken back from devices.",
        _evictions,
        "how",
        notes="`agreed`: the device had given the slab up; `forced`: it had not, in time.",
    ),
    *_each(
        "counter",
        _service,
        (
            "evictions_refused_total",
            "Evictions of an only copy, which devices refuse.",
            "evictions_refused",
        ),
        (
            "evictions_last_copies_total",
            "Slabs taken back by force although they held the only copy of pages.",
            "evictions_last_copies",
        ),
        ("eviction_batches_total", "Batches of evictions.", "eviction_batches"),
        ("leases_restored_total", "Leases taken over by a restarted daemon.", "leases_restored"),
        ("rdma_opened_total", "Leases that got RDMA connections.", "rdma_opened"),
    ),
    _counter(
        "rdma_registered_ahead_total",
        "Slabs registered for RDMA before a device waited for it.",
        _service("rdma_registered_ahead"),
    ),
    _counter(
        "leases_expired_total",
        "Leases that ended because their device did not come back in time.",
        _service("leases_expired"),
        notes="Also those that had connections and no session for an hour.",
    ),
    _counter(
        "control_requests_total",
        "Requests of devices on control sessions, by type.",
        lambda s: {tag: s.service[f"requests_{tag}"] for tag in _TAGS},
        "type",
    ),
    _counter(
        "control_refused_total",
        "Requests of devices that were refused, by reason.",
        _server_by("requests_refused_", m.REFUSED_REASONS),
        "reason",
        notes="`quota`: more leases or slots than the session or "
        "[its host](memory-manager.md#shares) may have; `busy`: more requests under way than a "
        "session may have, or old connections have not ended; the others say what they are.",
    ),
    _counter(
        "sessions_opened_total",
        "Control sessions that were opened.",
        lambda s: s.server["sessions_opened"],
    ),
    _counter(
        "sessions_ended_total",
        "Control sessions that ended, by reason.",
        _server_by("sessions_ended_", _ENDS),
        "reason",
    ),
    _counter(
        "handshakes_ended_total",
        "Handshakes of control sessions that devices ended, by reason.",
        _server_by("handshakes_ended_", _ENDS),
        "reason",
    ),
    _counter(
        "errors_total",
        "Errors of the daemon, and requests that it turned away.",
        _errors,
        "kind",
        notes="See below.",
    ),
)


def values(snapshot: DonorSnapshot) -> Figures:
    """All values at the moment of the snapshot."""
    return figures(METRICS, snapshot)
