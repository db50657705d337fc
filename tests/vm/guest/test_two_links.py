# SPDX-License-Identifier: Apache-2.0
"""RDMA over a cable, with two devices in one machine: each donor is reached by another one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import SLAB, Cluster, run, until
from support.jobs.fiojob import VERIFY, fio
from support.machine.softroce import two_links

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.kernels("6.12", "6.1"),
    pytest.mark.full,
]

SIZE = "32M"
PAGE_BYTES = 4096


@pytest.fixture
def links() -> Iterator[dict[str, str]]:
    """The RDMA devices and their addresses."""
    with two_links() as found:
        yield found


def sent(rdma_device: str) -> int:
    """Packets that it has sent, over the cable or to itself."""
    counters = Path("/sys/class/infiniband", rdma_device, "ports/1/hw_counters")
    return int((counters / "sent_pkts").read_text())


def crossed(rdma_device: str) -> int:
    """Packets that have left its interface by the cable."""
    interface = Path("/sys/class/infiniband", rdma_device, "ports/1/gid_attrs/ndevs/0")
    statistics = Path("/sys/class/net", interface.read_text().strip(), "statistics")
    return int((statistics / "tx_packets").read_text())


def connected() -> dict[int, set[str]]:
    """The RDMA devices by which each process has connections."""
    found: dict[int, set[str]] = {}
    for queue_pair in json.loads(run("rdma", "-j", "resource", "show", "qp")):
        if queue_pair["type"] == "RC":
            status = Path("/proc", str(queue_pair["pid"]), "status").read_text()
            process = next(line for line in status.splitlines() if line.startswith("Tgid:"))
            found.setdefault(int(process.split()[1]), set()).add(queue_pair["ifname"])
    return found


def test_each_donor_is_reached_by_the_device_that_leads_to_it(
    links: dict[str, str], cluster: Cluster
) -> None:
    secret = cluster.root / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    cluster.env |= {
        "INFINISWAP_CLUSTER_SECRET_FILE": str(secret),
        "INFINISWAP_DEVICE_CONNECT_MS": "30000",
        "INFINISWAP_DEVICE_REQUEST_MS": "30000",
        "INFINISWAP_POLICY_SUSPEND_S": "20",
    }
    donors = {name: cluster.donor(host=address) for name, address in links.items()}
    device = cluster.start("--frontend", "nbd", "--transport", "rdma", size=SIZE)
    pages = ("--bs=64k", f"--size={SIZE}", "--iodepth=8")

    def is_mapped() -> bool:
        fio(device.path, "--rw=write", *pages)
        slabs = device.status["slabs"]
        return bool(slabs["mapped"] == sum(slabs.values()))

    until(is_mapped, "every slab to have a donor")
    rows = {row["address"]: row for row in device.status["donors"]}
    assert {row["transport"] for row in rows.values()} == {"rdma"}
    assert {address for address, row in rows.items() if row["slabs"]} == set(rows)
    found = connected()
    for name, donor in donors.items():
        assert found.pop(donor.process.pid) == {name}
    assert list(found.values()) == [set(links)]
    # Requests and answers cross the cable: what the one device asks the other one answers.
    before = {name: (crossed(name), sent(name)) for name in links}
    fio(device.path, "--rw=randwrite", *pages, *VERIFY)
    for name, (crossed_before, sent_before) in before.items():
        packets = sent(name) - sent_before
        assert packets > SLAB // PAGE_BYTES, "a page takes a packet"
        assert crossed(name) - crossed_before >= packets
    stats = device.status["stats"]
    assert stats["crc_errors_remote"] == stats["requests_failed"] == 0
    assert all("Traceback" not in donor.log for donor in donors.values())
    device.remove()
