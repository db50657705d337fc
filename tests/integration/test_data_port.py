# SPDX-License-Identifier: Apache-2.0
"""`infiniswap doctor` sends pages to each donor, over networks that let only some of them pass."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.devices.cluster import SLAB, WAIT_S, Cluster, Donor
from support.donors.donor_world import client_config, world
from support.machine.ran import ran

from infiniswap.system.netns import NetworkNamespaces
from infiniswap.watch.data_port import check_data_port

pytestmark = pytest.mark.requires_native

Findings = dict[str, list[dict[str, str]]]


def doctor(cluster: Cluster, donor: Donor, *args: str, prefix: tuple[str, ...] = ()) -> Findings:
    """The findings of a host, by name."""
    argv = (*prefix, *cluster.program, "doctor", "--json", "--donors", donor.address, *args)
    done = ran(*argv, env={**cluster.env, "INFINISWAP_DEVICE_SLAB": str(SLAB)}, wait_s=2 * WAIT_S)
    found: Findings = {}
    for each in json.loads(done.stdout):
        found.setdefault(each["name"], []).append(each)
    return found


@pytest.fixture
def net() -> Iterator[NetworkNamespaces]:
    with NetworkNamespaces(["donor", "consumer"]) as made:
        yield made


@pytest.fixture
def far_donor(cluster: Cluster, secret_file: Path, net: NetworkNamespaces) -> Donor:
    """In a network of its own."""
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    return cluster.donor(host=net.address("donor"), prefix=tuple(net.command("donor", ())))


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def consumer(net: NetworkNamespaces) -> tuple[str, ...]:
    return tuple(net.command("consumer", ()))


def slabs_lent(cluster: Cluster, donor: Donor, prefix: tuple[str, ...]) -> Any:
    argv = (*prefix, *cluster.program, "donor", "leases", "--json", donor.address)
    said = json.loads(ran(*argv, env=cluster.env, wait_s=WAIT_S).stdout)
    return said["lent_bytes"], said["leases"]


@pytest.mark.requires_root
@pytest.mark.requires_netns
@pytest.mark.requires_tool("ip", "nsenter")
def test_pages_pass_and_no_slab_is_taken(
    cluster: Cluster, net: NetworkNamespaces, far_donor: Donor
) -> None:
    (found,) = doctor(cluster, far_donor, prefix=consumer(net))["data-port"]
    assert found["state"] == "ok", found
    assert found["what"].startswith(f"{far_donor.address}: pages pass; one comes back in ")
    assert found["what"].endswith(" µs, MTU 1500")
    assert slabs_lent(cluster, far_donor, consumer(net)) == (0, [])
    assert "Traceback" not in far_donor.log


@pytest.mark.requires_root
@pytest.mark.requires_netns
@pytest.mark.requires_tool("ip", "nsenter")
def test_large_packets_that_a_switch_drops_are_found(
    cluster: Cluster, net: NetworkNamespaces, far_donor: Donor
) -> None:
    for host in ("donor", "consumer"):  # and the ports of the switch keep 1500
        ip("-n", net.namespace(host), "link", "set", "eth0", "mtu", "9000")
    found = doctor(cluster, far_donor, prefix=consumer(net))
    assert [each["state"] for each in found["donors"]] == ["ok"]  # the control port's are small
    (port,) = found["data-port"]
    assert port["state"] == "degraded", port
    assert "no page of 4 KiB gets to that host within 2 s" in port["what"]
    assert "something in between drops large packets (the MTU here is 9000)" in port["what"]
    assert "ping -M do -s 8972" in port["mend"]


def test_a_daemon_that_is_stopped_is_no_firewall(cluster: Cluster) -> None:
    donor = cluster.donor()
    donor.process.send_signal(signal.SIGSTOP)
    try:
        (found,) = doctor(cluster, donor)["donors"]
    finally:
        donor.process.send_signal(signal.SIGCONT)
    assert "although it accepts connections: its daemon is busy or stopped, or" in found["what"]
    assert "one MTU" in found["mend"]


@pytest.mark.requires_root
@pytest.mark.requires_netns
@pytest.mark.requires_tool("ip", "nsenter")
def test_a_data_port_behind_a_firewall_is_found(
    cluster: Cluster, net: NetworkNamespaces, far_donor: Donor
) -> None:
    rule = ("ipproto", "tcp", "sport", str(far_donor.data), "blackhole")
    ip("-n", net.namespace("donor"), "rule", "add", *rule)
    found = doctor(cluster, far_donor, prefix=consumer(net))
    assert [each["state"] for each in found["donors"]] == ["ok"]
    (port,) = found["data-port"]
    assert port["state"] == "degraded", port
    host = net.address("donor")
    assert port["what"] == f"donor {host}:{far_donor.data}: no answer within 2 s"
    assert f"its firewall lets TCP port {far_donor.data} in" in port["mend"]


def test_speed_is_measured_and_said_in_page_ins(cluster: Cluster) -> None:
    donor = cluster.donor()
    found = doctor(cluster, donor, "--speed")
    assert [each["state"] for each in found["data-port"]] == ["ok"]
    (speed,) = found["speed"]
    assert "MB/s from there, " in speed["what"]
    assert "Reading 1 GiB back in sequence takes at least " in speed["what"]
    assert "for each of its threads" in speed["what"]
    assert "speed" not in doctor(cluster, donor)


async def test_a_donor_without_a_test_page_is_only_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as w:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        w.donor.service.data_port = server.sockets[0].getsockname()[1]
        welcome = w.donor.service.welcome
        monkeypatch.setattr(
            w.donor.service,
            "welcome",
            lambda version, proof: structs.replace(welcome(version, proof), test_page=False),
        )
        assert await check_data_port(w.address, client_config(connect_s=WAIT_S)) is None
        assert w.store.stats()["leases"] == 0
        server.close()
