# SPDX-License-Identifier: Apache-2.0
"""A donor's figures, taken from its parts at one moment: for its status and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec import structs

from infiniswap import __version__
from infiniswap.control import messages as m
from infiniswap.donor.heat import SLABS_LISTED_MAX
from infiniswap.donor.leases import GrantedLease
from infiniswap.engine.store import LeaseStats, Store
from infiniswap.errors import EngineError

if TYPE_CHECKING:
    from infiniswap.donor.service import DonorService

LEASES_BYTES_MAX: Final = 3 * m.MESSAGE_BYTES_MAX // 4
"""Of a status, for its leases: more than 1700 of them with the longest names of hosts."""
OF_THE_DATA_PORT: Final = {
    "connections_refused": "data_connections_refused",
    "protocol_errors": "data_protocol_errors",
}
"""Names in a status for counters of the store that the control port has by the same name."""


class DonorSnapshot:
    """The donor at one moment; it is made without waiting.

    Args:
        donor: the service.

    Attributes:
        status: for the control API.
        stats: every field of struct isw_store_stats.
        service, harvest, server: counters of these parts.
        started_unix_s: when the service was made.
        is_short: mapped slabs have to be taken back.
        slo: of the service that is protected; None: there is none.
        is_held: nothing more is lent, for its sake.
    """

    def __init__(self, donor: DonorService) -> None:
        harvester, identity = donor.harvester, donor.identity
        self.stats = stats = donor.store.stats()
        self.service: Mapping[str, int] = donor.counters
        self.server: Mapping[str, int] = donor.server_counters
        self.harvest = harvester.counters
        self.started_unix_s: float = donor.started_unix_s
        self.is_short: bool = harvester.is_short
        self.slo = donor.guard
        self.is_held: bool = harvester.is_held
        policy, figures = harvester.policy, harvester.figures
        limits = policy.config
        draining = donor.drain.is_active
        self.status = m.Status(
            donor_id=identity.donor_id,
            donor_name=identity.name,
            incarnation=identity.incarnation,
            software=__version__,
            versions=list(m.VERSIONS),
            uptime_s=donor.uptime_s(),
            slab_bytes=limits.slab_bytes,
            control_port=donor.control_port,
            data_port=donor.data_port,
            draining=draining,
            no_room=donor.room.why_none(),
            degraded=[sentence for said in donor.degraded.values() for sentence in said]
            + ([] if donor.keys is None else donor.keys.sentences())
            + ([] if donor.guard is None else donor.guard.degraded),
            second_secret_idle_s=None if donor.keys is None else donor.keys.second_idle_s(),
            sessions=len(donor.sessions),
            pool=m.PoolStatus(
                limit_bytes=limits.slabs_max * limits.slab_bytes,
                slabs_max=limits.slabs_max,
                slabs_free=stats["slabs_free"],
                slabs_mapped=stats["slabs_mapped"],
                slabs_dirty=stats["slabs_dirty"],
                slabs_unpinned=stats["slabs_unpinned"],
                can_map=0 if draining or harvester.is_held else harvester.pool.mappable(),
            ),
            memory=m.MemoryStatus(
                source=harvester.memory.name,
                total_bytes=figures.total_bytes,
                available_bytes=figures.available_bytes,
                headroom_bytes=limits.headroom_bytes,
                others_bytes=policy.others_bytes,
                used_share=harvester.used_share(),
                cache_bytes=harvester.cache_bytes,
            ),
            leases=[_lease_status(donor.store, lease) for lease in donor.table.leases()],
            counters={
                **{
                    OF_THE_DATA_PORT.get(name, name): value
                    for name, value in stats.items()
                    if not name.startswith("slabs_")
                },
                **self.service,
                **self.harvest,
                **self.server,
            },
        )


def full_status(donor: DonorService) -> m.Status:
    """The status with what devices have said, which metrics do not need; made without waiting."""
    status, leases = DonorSnapshot(donor).status, donor.table.leases()
    is_listed = sum(len(lease.slots) for lease in leases) <= SLABS_LISTED_MAX
    told = [
        structs.replace(
            row,
            slabs=donor.heat.slabs(lease) if is_listed else [],
            device=donor.heat.said(lease.lease).device,
        )
        for row, lease in zip(status.leases, leases, strict=True)
    ]
    return fitting(structs.replace(status, leases=told))


def fitting(status: m.Status) -> m.Status:
    """The status, short enough for every client whatever names consumers have given themselves:
    where need be without the leases that hold the fewest slabs."""
    kept: set[int] = set()
    left_bytes = LEASES_BYTES_MAX
    for lease in sorted(status.leases, key=lambda lease: -lease.slots_mapped):
        left_bytes -= len(m.encode(lease)) + 1
        if left_bytes < 0:
            break
        kept.add(lease.lease)
    leases = [lease for lease in status.leases if lease.lease in kept]
    return structs.replace(status, leases=leases, leases_left_out=len(status.leases) - len(leases))


def _lease_status(store: Store, lease: GrantedLease) -> m.LeaseStatus:
    try:
        stats = store.lease_stats(lease.lease)
    except EngineError:  # expired, and destroyed in this moment
        stats = LeaseStats(0, 0, 0, 0, 0, 0)
    record, by_rdma = lease.record, stats.rdma_connections > 0
    return m.LeaseStatus(
        lease=lease.lease,
        device_id=record.device_id,
        device_name=record.device_name,
        host_name=record.host_name,
        address=record.address,
        state=lease.state.value,
        session=lease.session is not None,
        epoch=record.epoch,
        slots_max=record.slots_max,
        slots_mapped=len(lease.slots),
        connections=stats.connections,
        read_bytes=stats.read_bytes,
        write_bytes=stats.write_bytes,
        host_certified=bool(record.certified_host),
        job=record.use.job,
        user=record.use.user,
        uid=record.use.uid,
        tenant=record.use.tenant,
        granted_unix_s=record.granted_unix_s or None,
        transport="rdma" if by_rdma else "tcp" if stats.connections else "",
        pages_per_s=None if by_rdma else lease.traffic.pages_per_s,
    )
