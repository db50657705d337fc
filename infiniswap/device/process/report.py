# SPDX-License-Identifier: Apache-2.0
"""The status of a running device, put together from its parts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from infiniswap.control.figures import histogram
from infiniswap.device.api import DeviceStatus, DonorRow, SwapRow
from infiniswap.device.donors.counts import LinkCounts
from infiniswap.device.process.parts import Parts
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.engine.protocol import Engine, EngineFigures, histogram_quantiles
from infiniswap.system.surroundings.in_force import in_force

_WAITED = "read_requests_waited_us"
"""Name of the time of all page-ins that waited, among the totals."""

_TOTALS = [name for name in DonorRow.__struct_fields__ if name.endswith("_pages")] + ["errors"]


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """The device at one moment.

    Attributes:
        status: as the control API gives it.
        figures: of the engine, which the status was made from.
        links: counts of the link to each donor, by its address.
        started_s: when the process began to serve, in Unix time.
    """

    status: DeviceStatus
    figures: EngineFigures
    links: dict[str, LinkCounts]
    started_s: float


def snapshot(
    parts: Parts, *, started_s: float, uptime_s: float, notes: list[str], runs: list[int]
) -> DeviceSnapshot:
    """Looks at every part; does not wait.

    Args:
        parts: of the device, all made.
        started_s: when the process began to serve, in Unix time.
        uptime_s: of the process.
        notes: what an administrator should know of the last reload and of the metrics port.
        runs: see DeviceStatus.
    """
    spec, engine, mapper, attachment = parts.spec, parts.engine, parts.mapper, parts.attachment
    assert attachment is not None
    keep_awake = parts.keep_awake
    figures = engine.figures()
    waited, bounds_ns = figures.latency["waited_read_latency"], figures.latency_bounds_ns
    stats = {**figures.counts, _WAITED: round(histogram(waited, bounds_ns).sum_s * 1e6)}
    p50_ns, p99_ns = histogram_quantiles(waited, bounds_ns, (0.5, 0.99))
    by_choice = stats["fallback_quicker"] + stats["fallback_measured"]
    chosen = stats["pages_in_remote"] + by_choice
    served = stats["pages_in_remote"] + stats["pages_in_staging"] + stats["pages_in_backup"]
    status = DeviceStatus(
        name=spec.name,
        device_id=spec.device_id,
        pid=os.getpid(),
        uptime_s=round(uptime_s, 1),
        size_bytes=spec.size_bytes,
        slab_bytes=spec.config.device.slab_bytes,
        frontend=attachment.choice.frontend,
        path=attachment.path,
        backup=spec.backup,
        swap=SwapRow(
            active=attachment.swap_active,
            priority=attachment.priority,
            used_bytes=attachment.swap_used_bytes(),
        ),
        ephemeral=spec.ephemeral,
        sealed=spec.config.device.seal,
        state=parts.state,
        slabs=mapper.slab_states(),
        pages_on_donors=sum(slab.remote_valid_pages for slab in engine.slabs()),
        donors=_donor_rows(engine, mapper),
        stats=stats,
        remote_share=stats["pages_in_remote"] / served if served else None,
        chosen_share=stats["pages_in_remote"] / chosen if chosen else None,
        backup_expected_us=stats["backup_expected_ns"] / 1000,
        page_in_us_p50=p50_ns / 1000,
        page_in_us_p99=p99_ns / 1000,
        degraded=_degraded(parts, notes),
        alarms=list(mapper.alarms.values()),
        runs=runs,
        awake=keep_awake is not None and keep_awake.awake,
        evictions=mapper.counts.evicted,
        slab_counts=dataclasses.asdict(mapper.counts),
        succession=parts.succession.row(),
        far=parts.far.row(),
    )
    links = {str(link.address): link.connections.counts for link in mapper.known_donors.links}
    return DeviceSnapshot(status, figures, links, started_s)


def _degraded(parts: Parts, notes: list[str]) -> list[str]:
    keep_awake = parts.keep_awake
    problem = None if keep_awake is None else keep_awake.problem
    return [
        *parts.degraded,
        *map(str, in_force(os.getpid())),
        *parts.key.degraded(parts.spec),
        *parts.shown.degraded(),
        *([str(problem)] if problem else []),
        *notes,
        *parts.succession.degraded(),
        *parts.finder.degraded(),
    ]


def _donor_rows(engine: Engine, mapper: SlabMapper) -> list[DonorRow]:
    remotes = {info.remote: info for info in engine.remotes()}
    rows = []
    for link in mapper.known_donors.links:
        info = remotes.get(link.remote) if link.remote is not None else None
        counts, transport = link.connections.counts, link.connections.transport
        totals = counts.totals(info)
        rows.append(
            DonorRow(
                address=str(link.address),
                name=link.name,
                state=link.state,
                detail=link.detail,
                slabs=len(link.mapped),
                **{name: totals[name] for name in _TOTALS},
                transport=transport.name,
                transport_reason=transport.reason,
                rdma_fallbacks=transport.fallbacks,
                rdma_probes=transport.probes,
                read_tail_us=info.read_tail_ns / 1000 if info else 0.0,
                expected_us=info.expected_ns / 1000 if info else 0.0,
                connections_lost=counts.connections_lost,
                reclaimed=counts.reclaimed,
                given_up=counts.given_up,
                sessions_broken=dict(counts.sessions_broken),
            )
        )
    return rows
