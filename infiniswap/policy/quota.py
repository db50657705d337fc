# SPDX-License-Identifier: Apache-2.0
"""What one consumer may keep of a donor's pool when another one needs memory.

A consumer may take more than its share as long as no other one asks: idle memory helps nobody. When
a consumer below its share asks and nothing is left, slabs of consumers above their share are taken
back for it.

A consumer is a host, and its tenants divide what it has, by the same rule. Names of tenants are
what a host says, so they decide nothing between hosts: a host with forty tenants has the share of
one with a single tenant, and equal names on two hosts are two tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeAlias, TypeVar

Consumer = TypeVar("Consumer", bound=Hashable)
Host = TypeVar("Host", bound=Hashable)

Tenant: TypeAlias = tuple[Host, str]
"""A host, and a name that is good on this host alone; empty: devices that were given none."""


def fair_slabs(slabs_max: int, consumers: int, share_max: float) -> int:
    """Slabs that every consumer may count on; at least one.

    Args:
        slabs_max: size of the whole pool.
        consumers: how many hold slabs here, or ask for one.
        share_max: share of the pool that one consumer may keep at most while others need memory.
    """
    return max(1, min(int(slabs_max * share_max), slabs_max // max(1, consumers)))


def over_quota(
    held: Mapping[Consumer, int], asking: Consumer, slabs_max: int, share_max: float
) -> dict[Consumer, int]:
    """Who has to give slabs back so that `asking` gets one, and how many at most.

    Args:
        held: slabs by consumer.
        asking: a consumer that wants one slab more.
        slabs_max: of the whole pool.
        share_max: see fair_slabs.

    Returns:
        Slabs above the fair share by consumer; empty when `asking` has its share already.
    """
    holders = {consumer for consumer, slabs in held.items() if slabs > 0}
    fair = fair_slabs(slabs_max, len(holders | {asking}), share_max)
    if held.get(asking, 0) >= fair:
        return {}
    over = {consumer: slabs - fair for consumer, slabs in held.items() if slabs > fair}
    # One slab above the share is no reason if taking it would only swap the two consumers.
    return {c: n for c, n in over.items() if c != asking and held[c] - held.get(asking, 0) > 1}


def is_above_share(
    held: Mapping[Consumer, int], consumer: Consumer, slabs_max: int, share_max: float
) -> bool:
    """Whether a consumer has more than it may keep while others need memory; see fair_slabs."""
    holders = sum(slabs > 0 for slabs in held.values())
    return held.get(consumer, 0) > fair_slabs(slabs_max, holders, share_max)


def tenants_over(
    held: Mapping[Tenant[Host], int], asking: Tenant[Host], slabs_max: int, share_max: float
) -> dict[Tenant[Host], int]:
    """Which tenants have to give slabs back so that `asking` gets one, and how many at most.

    Hosts above their share give first. Of such a host those tenants give that have at least the
    mean of its tenants. If there is no such host, the tenants of the asking host divide equally
    what this host has.

    Args:
        held: slabs by tenant.
        asking: a tenant that wants one slab more.
        slabs_max: of the whole pool.
        share_max: see fair_slabs; of a host.
    """
    hosts: Counter[Host] = Counter()
    tenants: Counter[Host] = Counter()
    for (host, _), slabs in held.items():
        hosts[host] += slabs
        tenants[host] += slabs > 0
    own = asking[0]
    if over := over_quota(hosts, own, slabs_max, share_max):
        return {
            tenant: min(slabs, over[tenant[0]])
            for tenant, slabs in held.items()
            if tenant[0] in over and slabs > 0 and slabs * tenants[tenant[0]] >= hosts[tenant[0]]
        }
    return over_quota({t: n for t, n in held.items() if t[0] == own}, asking, hosts[own], 1.0)
