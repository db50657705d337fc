# SPDX-License-Identifier: Apache-2.0
"""Clusters of tools/netns-cluster for tests, and what one has left on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netns_cluster import cluster as clusters
from netns_cluster import memory, network, record
from netns_cluster.cluster import Cluster
from netns_cluster.plan import HostPlan, Plan

from support.devices.cluster import SLAB, WAIT_S
from support.machine.ran import ran


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


@contextlib.contextmanager
def cluster_of(
    memory_bytes: list[int], headroom_bytes: int, settings: dict[str, str]
) -> Iterator[Cluster]:
    """Hosts with so much memory; nothing of them stays."""
    name, before = unused_name(), links()
    hosts = tuple(HostPlan(size) for size in memory_bytes)
    try:
        yield clusters.up(Plan(name, hosts, SLAB, str(headroom_bytes), settings, keep=True))
    finally:
        clusters.down(name)
    assert not left_of(name)
    assert links() == before


def on_host(cluster: Cluster, host: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a command there, which must succeed."""
    command = cluster.command(host, argv, cgroup=False)
    done = ran(*command, env=cluster.environment(host), wait_s=4 * WAIT_S)
    assert done.returncode == 0, f"{host}: {argv}: {done.stderr}"
    return done


class HostedDevice:
    """A device that was started on a host."""

    def __init__(self, cluster: Cluster, host: str, name: str, *options: str) -> None:
        self.cluster = cluster
        self.host = host
        self.name = name
        self.run = cluster.directory(host) / "devices" / name
        self.command("start", *options)

    def command(self, action: str, *options: str) -> str:
        """`infiniswap device ACTION NAME OPTIONS`, must succeed."""
        argv = ("infiniswap", "device", action, self.name, *options)
        return on_host(self.cluster, self.host, *argv).stdout

    @property
    def status(self) -> Any:
        """`device show --json`."""
        return json.loads(self.command("show", "--json"))
