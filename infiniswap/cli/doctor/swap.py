# SPDX-License-Identifier: Apache-2.0
"""Findings about swapping: how the kernel does it, and what else it would swap to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from infiniswap.cli.doctor.finding import Finding, degraded, good, missing
from infiniswap.cli.doctor.host import number
from infiniswap.config import Config
from infiniswap.device.cleanup import leftovers
from infiniswap.device.frontends import Places
from infiniswap.documents import page
from infiniswap.errors import UnavailableError
from infiniswap.system import zswap
from infiniswap.system.files import PROC, SYS
from infiniswap.system.memory import memory_hierarchy
from infiniswap.system.swap import PRIORITY_MAX, SwapArea, active_areas, priority_above
from infiniswap.units import counted, format_size_short


def settings(*, proc: Path = PROC, sys: Path = SYS) -> Iterator[Finding]:
    """The kernel's settings for paging."""
    yield from _swappiness(proc)
    cluster = number(proc / "sys/vm/page-cluster")
    if cluster is None:
        pass
    elif cluster == 0:
        yield degraded(
            "page-cluster",
            "vm.page-cluster is 0: the kernel reads one page per fault and nothing ahead, so "
            "reading back in sequence is several times slower",
            "sysctl -w vm.page-cluster=3",
        )
    elif cluster > 5:
        yield degraded(
            "page-cluster",
            f"vm.page-cluster is {cluster}: each fault reads {counted(1 << cluster, 'page')}, "
            "most of them for nothing",
            "sysctl -w vm.page-cluster=3",
        )
    else:
        yield good(
            "page-cluster", f"up to {counted(1 << cluster, 'page')} per fault (vm.page-cluster)"
        )
    yield from _zswap(proc, sys)


def _swappiness(proc: Path) -> Iterator[Finding]:
    swappiness = number(proc / "sys/vm/swappiness")
    if swappiness is None:
        yield missing("swappiness", "this kernel has no swap", "use one with CONFIG_SWAP")
        return
    if swappiness:
        yield good("swappiness", f"vm.swappiness is {swappiness}")
        return
    try:
        version = memory_hierarchy(proc=proc).version
    except UnavailableError:
        version = 0
    mend = "sysctl -w vm.swappiness=60"
    if version == 1:
        yield degraded(
            "swappiness",
            "vm.swappiness is 0: `infiniswap run` sets its own value, but the kernel hardly swaps "
            "other programs to a device, and never those in memory cgroups",
            mend,
        )
    else:
        yield missing(
            "swappiness",
            "vm.swappiness is 0: the kernel never swaps out what has a memory limit; jobs are "
            "killed at their limit instead",
            mend,
        )


def _zswap(proc: Path, sys: Path) -> Iterator[Finding]:
    if not zswap.is_on(sys=sys):
        yield good("zswap", "off")
        return
    version, kept_by = 0, None
    with contextlib.suppress(UnavailableError):
        hierarchy = memory_hierarchy(proc=proc)
        version = hierarchy.version
        kept_by = zswap.keeps_pages_at((hierarchy.mount_point,), sys=sys)  # where jobs are
    if kept_by is not None:
        yield degraded(
            "zswap",
            f"on, and {kept_by} is 0: what zswap does not take stays in memory and never reaches "
            "donors, so jobs are killed at their limit instead",
            f"echo 1 > {kept_by}",
        )
        return
    what = (
        "on: pages are first compressed into this host's memory, up to "
        f"{zswap.pool_percent_max(sys=sys)} % of it; the rest goes to donors"
    )
    if version == 1:
        what += ". Limits of jobs do not count that memory (cgroup version 1)"
    found, where = zswap.of_host(proc=proc), page("when-to-use.md")
    share = None if found is None else found.shrunk_share
    if found is None or share is None:
        yield good(
            "zswap",
            f"{what}. It helps jobs whose pages shrink to less than half, and slows down the "
            "others, such as those on tables of numbers: the summary of `infiniswap run` shows "
            f"which it is ({where})",
        )
        return
    what += f". It holds {format_size_short(found.held_bytes)}, shrunk to {share:.0%}"
    if share <= zswap.HELPS_SHARE_MAX:
        yield good("zswap", f"{what}: that helps")
    elif version == 1:
        as_memory = f"{format_size_short(found.pool_bytes)} more as --local would help a job more"
        yield good("zswap", f"{what}: {as_memory} ({where})")
    else:
        yield degraded(
            "zswap",
            f"{what}: that slows jobs down ({where})",
            f"echo N > {zswap.switch(sys=sys)}",
        )


def areas(config: Config, *, proc: Path = PROC, sys: Path = SYS) -> Iterator[Finding]:
    """Active swap areas, against the priority that a device would get."""
    found = active_areas(proc=proc)
    ours = leftovers.owners_of_areas(found, config.device.run_dir, Places(sys=sys))
    if not set(found) - set(ours):
        yield good("swap", "no other swap area is active")
    for area in found:
        in_use = f"priority {area.priority}, {format_size_short(area.used_bytes)} in use"
        owner = ours.get(area)
        if owner is None:
            yield _other(area, in_use, config.device.priority)
        elif owner.alive:
            yield good("swap", f"{area.path}: device {owner.name}, {in_use}")
        else:
            yield missing(
                "swap",
                f"{area.path}: {in_use}, but the process of device {owner.name} has died: what is "
                "swapped out there is lost, and programs that touch it are killed",
                f"end those programs, then: swapoff {area.path} && {owner.mend}",
            )


def _other(area: SwapArea, in_use: str, priority: int | None) -> Finding:
    text = f"{area.path}: {in_use}"
    lower = f"swapoff {area.path} && swapon -p 10 {area.path}"
    if area.priority >= PRIORITY_MAX:
        return degraded("swap", f"{text}; nothing can come before it", lower)
    if priority is not None and area.priority >= priority:
        when = "in turn with" if area.priority == priority else "before"
        return degraded(
            "swap",
            f"{text}; it is used {when} devices, whose priority is {priority} (device.priority)",
            f'priority = "auto" under [device], or: {lower}',
        )
    ahead = priority_above([area]) if priority is None else priority
    return good("swap", f"{text}; devices come before it, with priority {ahead} or higher")
