# SPDX-License-Identifier: Apache-2.0
"""RDMA devices as the kernel lists them. Programs may not be able to use all of them.

A program also needs the device's provider (a library of rdma-core). Without the provider libibverbs
does not list the device, and nothing says so (Documentation/ABI/stable/sysfs-class-
infiniband in the kernel's tree).
"""

from __future__ import annotations

from pathlib import Path

from infiniswap import rights
from infiniswap.system.files import PROC, SYS, try_read_text


def devices(*, sys: Path = SYS) -> tuple[str, ...]:
    """Names of the kernel's RDMA devices, sorted."""
    try:
        return tuple(sorted(entry.name for entry in (sys / "class/infiniband").iterdir()))
    except OSError:
        return ()


def interface(device: str, port: int, *, sys: Path = SYS) -> str:
    """The network interface behind an Ethernet port; empty when the kernel does not say."""
    base = sys / "class/infiniband" / device
    # A port that is down may have no GIDs; soft-RoCE names its interface apart from them.
    names = sorted((base / f"ports/{port}/gid_attrs/ndevs").glob("*"))
    for path in (*names, base / "parent"):
        if name := (try_read_text(path) or "").strip():
            return name
    return ""


def locks_without_limit(*, proc: Path = PROC) -> bool:
    """Whether RLIMIT_MEMLOCK does not bind this process, because it has CAP_IPC_LOCK."""
    return rights.has("CAP_IPC_LOCK", proc=proc)
