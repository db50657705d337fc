# SPDX-License-Identifier: Apache-2.0
"""How slow jobs are when donors are full, by who has to give slabs back.

host and tenant are the product's rule, without and with tenants. attained is one that was tried
(docs/policies.md): hosts share as ever, and the devices of a host are ranked by the GiB·s that they
have had, in queues. A device takes slabs of those in lower queues. One that has lacked slabs for
long is in the first queue again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from msgspec import Struct

from infiniswap.errors import ConfigError
from infiniswap.policy.quota import over_quota
from infiniswap.simulation.device import Device
from infiniswap.simulation.donor import DonorHost, Lent
from infiniswap.simulation.measures import quantile
from infiniswap.simulation.scenario import Scenario
from infiniswap.simulation.world import World

Progress = Callable[[float], None]

_QUEUES_GIB_S: Final = (200.0, 2000.0)
"""A device is in the first queue up to the first number, and so on."""
_PROMOTED_S: Final = 1200.0
"""A device that lacked slabs for so long is in the first queue again."""


class AttainedDonor(DonorHost):
    """Ranks the devices of a host by what they have had of all donors, more than a donor knows."""

    __slots__ = ()

    def gives(self, device: Device) -> list[Lent]:
        """See DonorHost."""
        held = Counter(lent.device.host for lent in self.held)
        over = over_quota(held, device.host, self.policy.config.slabs_max, self.share_max)
        mine = _queue(device)
        among = [
            lent
            for lent in self.held
            if lent.device.host in over
            or (not over and lent.device.host == device.host and _queue(lent.device) > mine)
        ]
        ranks = {lent: (_queue(lent.device), lent.device.attained_gib_s) for lent in among}
        most = max(ranks.values(), default=None)
        return [lent for lent, rank in ranks.items() if rank == most]


def _queue(device: Device) -> int:
    if device.waited_s >= _PROMOTED_S:
        device.attained_gib_s = device.waited_s = 0.0
    return sum(device.attained_gib_s >= bound for bound in _QUEUES_GIB_S)


class SharingRow(Struct, frozen=True):
    """Jobs of one name under one way of sharing. A slowdown of 1 is a run with all of its pages on
    donors; jobs that have not ended count with what they have done.

    Attributes:
        evictions: slabs that donors took back, of all jobs.
    """

    way: str
    job: str
    jobs: int
    mean: float
    p95: float
    evictions: int


def sharing(
    scenario: Scenario, ways: Sequence[str], seed: int, progress: Progress | None = None
) -> list[SharingRow]:
    """The same jobs under each way; a row for each name of a job, and one for all jobs.

    Raises:
        ConfigError: no job has an end of its own.
    """
    if not any(job.work_s for job in scenario.jobs):
        raise ConfigError(
            "[sharing] compares how slow jobs are, and no job has work to do",
            where=scenario.origin,
            mend="Give some [[jobs]] a work_s.",
        )
    rows = []
    for place, way in enumerate(ways):
        own = scenario
        if way == "host":
            own = replace(own, jobs=tuple(replace(job, tenant="") for job in own.jobs))
        world = World(own, seed, donor=AttainedDonor if way == "attained" else DonorHost)

        def tell(part: float, place: int = place) -> None:
            if progress is not None:
                progress((place + part) / len(ways))

        world.run(tell)
        found = world.slowdowns()
        for name in ("all", *dict.fromkeys(job.name for job in scenario.jobs)):
            values = sorted(value for job, value in found if name in ("all", job))
            if values:
                mean, p95 = fmean(values), quantile(values, 0.95)
                evictions = world.counts["evictions"]
                rows.append(SharingRow(way, name, len(values), mean, p95, evictions))
    return rows
