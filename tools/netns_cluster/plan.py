# SPDX-License-Identifier: Apache-2.0
"""What a cluster is to be, and whether it can."""

from __future__ import annotations

from dataclasses import dataclass, field

from infiniswap.errors import MemoryLimitError, UsageError
from infiniswap.system.memory import machine_memory
from infiniswap.units import MIB, format_size, format_size_short
from netns_cluster import network

_MEMORY_BYTES_MIN = 96 * MIB
"""A daemon by itself takes a third of that."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What a host is to be; see Host."""

    memory_bytes: int = 512 * MIB
    pool: str = "auto"
    link: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cluster is to be.

    Attributes:
        name: its name.
        hosts: h1, h2, ... in this order.
        slab_bytes: unit of lending.
        headroom: of every daemon, as its option has it.
        settings: more of the configuration: `section.key` to TOML.
        keep: it stays when the process that makes it ends.
    """

    name: str
    hosts: tuple[HostPlan, ...]
    slab_bytes: int = 16 * MIB
    headroom: str = "auto"
    settings: dict[str, str] = field(default_factory=dict)
    keep: bool = False


def check(plan: Plan) -> None:
    """Refuses one that cannot be.

    Raises:
        UsageError: says why.
    """
    if not 1 <= len(plan.hosts) <= network.HOSTS_MAX:
        raise UsageError(f"a cluster has 1 to {network.HOSTS_MAX} hosts")
    for host in plan.hosts:
        network.check_rate(host.link)
        if host.memory_bytes < _MEMORY_BYTES_MIN:
            raise UsageError(f"a host needs at least {format_size(_MEMORY_BYTES_MIN)} of memory")


def check_memory(plan: Plan) -> None:
    """Refuses more memory than there is.

    Raises:
        MemoryLimitError: says how much.
    """
    wanted = sum(host.memory_bytes for host in plan.hosts)
    available = machine_memory().available_bytes
    if wanted > available:
        raise MemoryLimitError(
            f"{len(plan.hosts)} hosts with {format_size_short(wanted)} of memory together are "
            f"more than this machine has available ({format_size_short(available)})",
            mend="Give each less with --memory.",
        )
