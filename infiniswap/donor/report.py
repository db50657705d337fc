# SPDX-License-Identifier: Apache-2.0
"""What a donor tells of itself: every figure of its parts, taken at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from infiniswap import __version__
from infiniswap.control import messages as m
from infiniswap.donor.harvest import Harvester
from infiniswap.donor.leases import Lease
from infiniswap.donor.room import no_room
from infiniswap.engine.protocol import LeaseStats, Store
from infiniswap.errors import EngineError

LEASES_BYTES_MAX: Final = 3 * m.MESSAGE_BYTES_MAX // 4
"""Of a status, for its leases: more than 1700 of them with the longest names of hosts."""


@dataclass(frozen=True, slots=True)
class DonorIdentity:
    """Who this donor is.

    Attributes:
        donor_id: UUID, the same over restarts.
        name: for tables.
        incarnation: 128 bits in hex, new with every start that finds no slabs of before.
    """

    donor_id: str
    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the service itself adds; see messages.Status."""

    uptime_s: float
    slab_bytes: int
    pool_bytes: int
    control_port: int
    data_port: int
    authenticated: bool
    draining: bool
    degraded: list[str]
    sessions: int


class Snapshot:
    """The donor at one moment; making it waits for nobody.

    Attributes:
        status: for the control API.
        stats: every field of struct isw_store_stats.
        service, harvest, server: counters of these parts.
        is_short: mapped slabs have to be taken back.
    """

    def __init__(
        self,
        identity: DonorIdentity,
        store: Store,
        harvester: Harvester,
        leases: Iterable[Lease],
        state: ServiceState,
        service: Counter[str],
        server: Counter[str],
    ) -> None:
        self.stats = store.stats()
        self.service, self.server = service, server
        self.harvest = harvester.counters
        self.is_short = harvester.is_short
        stats, policy, figures = self.stats, harvester.policy, harvester.figures
        self.status = m.Status(
            donor_id=identity.donor_id,
            donor_name=identity.name,
            incarnation=identity.incarnation,
            software=__version__,
            versions=list(m.VERSIONS),
            uptime_s=state.uptime_s,
            slab_bytes=state.slab_bytes,
            control_port=state.control_port,
            data_port=state.data_port,
            authenticated=state.authenticated,
            draining=state.draining,
            no_room=no_room(harvester, draining=state.draining),
            degraded=state.degraded,
            sessions=state.sessions,
            pool=m.PoolStatus(
                limit_bytes=state.pool_bytes,
                slabs_max=policy.config.slabs_max,
                slabs_free=stats["slabs_free"],
                slabs_mapped=stats["slabs_mapped"],
                slabs_dirty=stats["slabs_dirty"],
                slabs_unpinned=stats["slabs_unpinned"],
                can_map=0 if state.draining else harvester.slabs_mappable(),
            ),
            memory=m.MemoryStatus(
                source=harvester.source,
                total_bytes=figures.total_bytes,
                available_bytes=figures.available_bytes,
                headroom_bytes=policy.config.headroom_bytes,
                others_bytes=policy.others_bytes,
                used_share=harvester.used_share(),
                cache_bytes=harvester.cache_bytes,
            ),
            leases=[_lease_status(store, lease) for lease in leases],
            counters={
                **{name: value for name, value in stats.items() if not name.startswith("slabs_")},
                **service,
                **harvester.counters,
                **server,
            },
        )


def fitting(status: m.Status) -> m.Status:
    """The status as an answer that every client takes, whatever names its consumers have given
    themselves: without the leases that hold the fewest slabs, if need be."""
    kept: set[int] = set()
    left_bytes = LEASES_BYTES_MAX
    for lease in sorted(status.leases, key=lambda lease: -lease.slots_mapped):
        left_bytes -= len(m.encode(lease)) + 1
        if left_bytes < 0:
            break
        kept.add(lease.lease)
    leases = [lease for lease in status.leases if lease.lease in kept]
    return structs.replace(status, leases=leases, leases_left_out=len(status.leases) - len(leases))


def _lease_status(store: Store, lease: Lease) -> m.LeaseStatus:
    try:
        stats = store.lease_stats(lease.lease)
    except EngineError:  # expired, and destroyed in this moment
        stats = LeaseStats(0, 0, 0, 0, 0, 0)
    return m.LeaseStatus(
        lease=lease.lease,
        device_id=lease.owner.device_id,
        device_name=lease.owner.device_name,
        host_name=lease.owner.host_name,
        address=lease.owner.address,
        state=lease.state.value,
        session=lease.session is not None,
        epoch=lease.epoch,
        slots_max=lease.slots_max,
        slots_mapped=len(lease.slots),
        connections=stats.connections,
        read_bytes=stats.read_bytes,
        write_bytes=stats.write_bytes,
    )
