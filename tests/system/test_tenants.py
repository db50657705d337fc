# SPDX-License-Identifier: Apache-2.0
"""Tenants on real daemons: a sweep of many devices, one more device of its host, and another host.

h1 lends as many slabs as the sweep has devices, and each of these fills one. Then a device with
another tenant asks on the same host, and last a device of another host, whose tenant has the name
of the sweep. INFINISWAP_TEST_SWEEP says how many devices; the test prints who has how much.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from netns_cluster.cluster import Cluster
from support.devices.cluster import SLAB, until
from support.machine.netns_hosts import HostedDevice, cluster_of
from support.machine.ran import ran

from infiniswap.units import CONTROL_PORT, MIB

pytestmark = [
    pytest.mark.full,
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_memcg,
    pytest.mark.requires_netns,
    pytest.mark.requires_tool("ip", "tc", "nsenter", "setsid", "nbdcopy"),
    pytest.mark.timeout(3600),
]

SWEEP = int(os.environ.get("INFINISWAP_TEST_SWEEP", "4"))
HEADROOM = 48 * MIB
SETTINGS = {
    "policy.period_s": "0.2",
    "policy.hot_pages_per_s": "1.0",
    "cluster.ask_s": "30.0",
    "daemon.preallocate_slabs": "1",
    "daemon.pool": f'"{SWEEP * SLAB >> 20}M"',
    "device.standby": '"off"',
    "device.staging": '"4M"',
}


class Device(HostedDevice):
    """A device of a tenant, and data for all of it."""

    def __init__(self, cluster: Cluster, host: str, name: str, slabs: int, tenant: str) -> None:
        donor = f"{cluster.record.host('h1').address}:{CONTROL_PORT}"
        options = ["--size", f"{slabs * SLAB >> 20}M", "--donors", donor]
        options += ["--frontend", "nbd-socket"] + (["--tenant", tenant] if tenant else [])
        super().__init__(cluster, host, name, *options)
        self.uri = f"nbd+unix:///?socket={self.run / 'nbd.sock'}"
        self.data = os.urandom(slabs * SLAB)

    def fill(self, file: Path) -> None:
        """Writes all of it."""
        file.write_bytes(self.data)
        done = ran("nbdcopy", str(file), self.uri)
        assert done.returncode == 0, done.stderr

    def check(self, file: Path) -> None:
        """Reads all of it."""
        done = ran("nbdcopy", self.uri, str(file))
        assert done.returncode == 0, done.stderr
        assert file.read_bytes() == self.data


def held(cluster: Cluster) -> dict[tuple[str, str], int]:
    """Slabs by host, from the first letters of a device's name, and tenant; none of a donor that is
    too busy to answer."""
    status = cluster.state("h1").status
    found: Counter[tuple[str, str]] = Counter()
    for lease in status.leases if status is not None else ():
        found[lease.device_name[:2], lease.tenant] += lease.slots_mapped
    return {who: slabs for who, slabs in found.items() if slabs}


def ask_until(device: Device, file: Path, wanted: dict[tuple[str, str], int]) -> None:
    """Writes to the device again and again, so that it wants a donor for every slab."""

    def done() -> bool:
        device.fill(file)
        return held(device.cluster) == wanted

    until(done, f"{wanted}")


@pytest.fixture
def three() -> Iterator[Cluster]:
    memory = SWEEP * SLAB + HEADROOM + 160 * MIB  # each may have the pool, only h1 is asked
    with cluster_of([memory] * 3, HEADROOM, SETTINGS) as made:
        yield made


def test_a_sweep_is_one_tenant_of_its_host(
    three: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file, devices = tmp_path / "content", []
    shown = request.config.pluginmanager.getplugin("capturemanager")

    def tell(what: str) -> None:
        with shown.global_and_fixture_disabled():
            print(f"{what}: {held(three)}", flush=True)

    sweep, one, other = ("h2", "sweep"), ("h2", "one"), ("h3", "sweep")
    try:
        for number in range(SWEEP):
            devices.append(Device(three, "h2", f"h2s{number}", 1, "sweep"))
            devices[-1].fill(file)
            until(lambda: held(three) == {sweep: len(devices)}, "a slab for the sweep")
        tell(f"{SWEEP} devices of h2")
        devices.append(Device(three, "h2", "h2one", SWEEP, "one"))
        ask_until(devices[-1], file, {sweep: SWEEP // 2, one: SWEEP // 2})
        tell("and one of another tenant there")
        devices.append(Device(three, "h3", "h3", SWEEP, "sweep"))
        ask_until(devices[-1], file, {sweep: SWEEP // 4, one: SWEEP // 4, other: SWEEP // 2})
        tell("and one of h3")
        for device in (devices[0], *devices[-2:]):
            device.check(file)
    finally:
        for device in devices:
            device.command("remove")
