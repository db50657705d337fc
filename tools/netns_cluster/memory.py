# SPDX-License-Identifier: Apache-2.0
"""The hosts' memory: one cgroup per cluster, in it one with a limit per host.

    iswc-NAME/            no limit: for counting and for taking away
      h1/                 the host's memory; its daemon reads these figures
        system/           daemon and squeezer; nothing of it is ever swapped out
        jobs/             what `exec` runs; may be swapped out

Swap areas are host-wide, and here all hosts are one. A daemon that had to wait for a page of its
own from a device that waits for that daemon would wait forever; so daemons may not be swapped out,
and processes that serve a device are in none of these cgroups.
"""

from __future__ import annotations

from pathlib import Path

from infiniswap.errors import ConflictError, UnavailableError, from_oserror
from infiniswap.system.cgroup import MemoryCgroup, create_memory_cgroup
from infiniswap.system.files import try_write_text
from infiniswap.system.memory import UNLIMITED_BYTES, memory_hierarchy
from netns_cluster.record import PREFIX

SYSTEM, JOBS = "system", "jobs"


def cluster_cgroup(name: str) -> MemoryCgroup:
    """The cluster's cgroup, whether it exists or not.

    Raises:
        UnavailableError: no memory cgroups on this machine.
    """
    hierarchy = memory_hierarchy()
    return MemoryCgroup(hierarchy.mount_point / f"{PREFIX}{name}", hierarchy.version)


def host_cgroup(name: str, host: str) -> MemoryCgroup:
    """A host's cgroup, likewise."""
    above = cluster_cgroup(name)
    return MemoryCgroup(above.path / host, above.version)


def leaf(name: str, host: str, part: str) -> Path:
    """Directory of SYSTEM or JOBS of a host."""
    return host_cgroup(name, host).path / part


def make(name: str) -> None:
    """Makes the cluster's cgroup.

    Raises:
        UnavailableError: no memory cgroups here that can be used.
        ConflictError: it exists.
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    top = create_memory_cgroup(f"{PREFIX}{name}", UNLIMITED_BYTES)
    _hand_down(top)


def make_host(name: str, host: str, limit_bytes: int) -> None:
    """Makes a host's cgroups.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    cgroup = host_cgroup(name, host)
    _mkdir(cgroup.path)
    cgroup.set_limit(limit_bytes)
    _hand_down(cgroup)
    for part in (SYSTEM, JOBS):
        _mkdir(cgroup.path / part)
    system = cgroup.path / SYSTEM
    # Version 2 has no such file where the kernel has no swap, and then there is nothing to rule.
    file = "memory.swap.max" if cgroup.version == 2 else "memory.swappiness"
    if not try_write_text(system / file, "0") and cgroup.version == 1:
        raise UnavailableError(
            "the daemons' memory cannot be kept out of the swap space: no memory.swappiness here",
            where=str(system),
        )


def remove(name: str) -> None:
    """Kills what is in the cluster's cgroup and removes it; nothing to do when it is gone.

    Raises:
        DeadlineError, ConflictError: something did not die.
    """
    try:
        cgroup = cluster_cgroup(name)
    except UnavailableError:
        return
    if cgroup.path.is_dir():
        cgroup.kill()
        cgroup.remove()


def _hand_down(cgroup: MemoryCgroup) -> None:
    """Lets children have limits, too (version 1: they do anyway)."""
    if cgroup.version == 2:
        try_write_text(cgroup.path / "cgroup.subtree_control", "+memory")


def _mkdir(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError as error:
        raise ConflictError("a cgroup of this name exists", where=str(path)) from error
    except OSError as error:
        raise from_oserror("cannot make a memory cgroup", error, where=str(path)) from error
