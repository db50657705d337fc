# SPDX-License-Identifier: Apache-2.0
"""How pages travel on a host without RDMA: by TCP, with the reason; never silently, nor in spite
of what was asked for. With RDMA: tests/vm/guest/test_rdma.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, Device, run, until

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_tool("qemu-io"),
    pytest.mark.skipif(
        Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()),
        reason="this host has RDMA devices",
    ),
]


def mapped(device: Device) -> bool:
    """Writes until a slab has a donor, which takes some activity."""
    run("qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", "-c", "read -P 7 0 1M", device.uri)
    return bool(device.status["slabs"]["mapped"])


def test_without_rdma_pages_go_over_tcp_with_the_reason(shared_cluster: Cluster) -> None:
    device = shared_cluster.start("--frontend", "nbd-socket", size="16M")
    until(lambda: mapped(device), "a slab to have a donor")
    rows = [row for row in device.status["donors"] if row["slabs"]]
    for row in rows:
        assert row["transport"] == "tcp"
        assert row["transport_reason"] == "here: this host has no RDMA device"
        assert row["rdma_fallbacks"] == 1
    assert rows
    assert "pages go over TCP, not RDMA: here: this host has no RDMA device" in device.log
    shown = shared_cluster.ok("device", "show", device.name)
    assert "tcp (no RDMA: here: this host has no RDMA device" in shown  # and how often it was tried
    asked = ("status", "--json", "--donors", shared_cluster.addresses)
    listed = json.loads(shared_cluster.ok(*asked))["devices"]
    (found,) = (row for row in listed if row["name"] == device.name)
    assert found["transport"] == {"tcp": len(rows)}
    addresses = [row["address"] for row in rows]
    assert found["transport_reasons"] == {"here: this host has no RDMA device": addresses}


def test_tcp_that_was_asked_for_needs_no_reason(shared_cluster: Cluster) -> None:
    device = shared_cluster.start("--frontend", "nbd-socket", "--transport", "tcp", size="16M")
    until(lambda: mapped(device), "a slab to have a donor")
    rows = [row for row in device.status["donors"] if row["slabs"]]
    assert [(row["transport"], row["transport_reason"]) for row in rows] == [("tcp", "")]
    assert "RDMA" not in device.log


def test_rdma_that_cannot_be_is_an_error_before_anything_is_attached(
    shared_cluster: Cluster,
) -> None:
    before = shared_cluster.names()
    done = shared_cluster.cli(
        "device", "start", shared_cluster.name(), "--size", "16M", "--frontend", "nbd-socket",
        "--donors", shared_cluster.addresses, "--transport", "rdma",
    )  # fmt: skip
    assert done.returncode == 5
    assert "no RDMA device" in done.stderr
    assert "--transport auto" in done.stderr
    assert shared_cluster.names() == before
