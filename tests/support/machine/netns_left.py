# SPDX-License-Identifier: Apache-2.0
"""What a cluster of tools/netns-cluster has left on the machine, for tests that make one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from netns_cluster import memory, network, record


def unused_name() -> str:
    """Of a cluster."""
    return f"t{secrets.token_hex(3)}"


def processes_of(name: str) -> list[str]:
    """Command lines of all that has this cluster's configuration, and of what is in its hosts."""
    mark = f"INFINISWAP_CONFIG={record.state_directory(name)}/".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode())
    return found


def left_of(name: str) -> list[str]:
    """Everything that is there and would not be without the cluster."""
    found = [f"process {one}" for one in processes_of(name)]
    found += [f"namespace {one}" for one in network.all_namespaces(name)]
    found += [
        f"path {path}"
        for path in (
            memory.cluster_cgroup(name).path,
            record.state_directory(name),
            record.work_directory(name),
            record.STATE_DIR / f"{name}.lock",
        )
        if path.exists()
    ]
    return found


def links() -> set[str]:
    """Network interfaces of the machine itself."""
    return set(os.listdir("/sys/class/net"))
