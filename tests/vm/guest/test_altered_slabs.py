# SPDX-License-Identifier: Apache-2.0
"""A donor that alters pages in its slabs, while a device reads them by RDMA, on soft-RoCE.

No process of the donor has a part in these reads, so nothing but the seal can notice. Somebody on
the path of pages by TCP: tests/integration/test_forged_pages.py.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import pytest
from support.devices.cluster import SLAB, Cluster, until
from support.devices.page_by_page import PageByPage
from support.donors.altered_slabs import ALTERATIONS, AlteredSlabs

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.kernels("6.12", "6.1"),
    pytest.mark.usefixtures("soft_roce"),
    pytest.mark.full,
]

PAGES = 40
LEFT_AFTER = 16
"""Bad pages, after which a device leaves a donor: docs/security.md."""


@pytest.fixture(autouse=True)
def lending(cluster: Cluster) -> None:
    """A donor with slabs in files: only one with a fixed port has these."""
    cluster.env |= {
        "INFINISWAP_DEVICE_CONNECT_MS": "30000",
        "INFINISWAP_DEVICE_REQUEST_MS": "30000",
        "INFINISWAP_DEVICE_HEDGE_MS": "0",  # reads go to the donor first
        "INFINISWAP_POLICY_SUSPEND_S": "20",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    cluster.donor(port=port, pool="64M")


def paging(cluster: Cluster, *args: str, seal: str = "true") -> PageByPage:
    """A device that pages to it by RDMA."""
    cluster.env["INFINISWAP_DEVICE_SEAL"] = seal
    options = ("--frontend", "nbd", "--transport", "rdma", *args)
    pages = PageByPage(cluster.start(*options, size=str(SLAB)), PAGES)
    assert pages.donor["transport"] == "rdma"
    return pages


@contextlib.contextmanager
def slabs_of(cluster: Cluster, pages: PageByPage) -> Iterator[AlteredSlabs]:
    """The donor's slabs; what it saw first is an earlier version of each page."""
    slabs = AlteredSlabs(cluster.root / "donors")
    try:
        assert len(slabs.pages) == PAGES
        pages.write()
        assert pages.read() == pages.pages
        yield slabs
    finally:
        slabs.close()


def test_without_a_backup_no_byte_is_wrong(cluster: Cluster) -> None:
    pages = paging(cluster, "--backup", "none")
    with slabs_of(cluster, pages) as slabs:
        right = slabs.pages
        for number, how in enumerate(ALTERATIONS.values(), 1):
            slabs.alter(how)
            assert pages.read() == [errno.EIO] * PAGES
            assert pages.stats["crc_errors_remote"] >= number * PAGES
            slabs.put(right)
            assert pages.read() == pages.pages
        # The only copies of its pages stay where they are.
        assert pages.donor["slabs"] == 1
        alarms = pages.device.status["alarms"]
        assert any(cluster.donors[0].address in alarm for alarm in alarms), alarms
    assert pages.donor["transport"] == "rdma"
    pages.device.remove()


@pytest.mark.parametrize("how", ALTERATIONS)
def test_with_a_backup_every_byte_is_right(cluster: Cluster, how: str) -> None:
    pages = paging(cluster)
    with slabs_of(cluster, pages) as slabs:
        slabs.alter(ALTERATIONS[how])
        assert pages.read() == pages.pages
    stats = pages.stats
    assert stats["requests_failed"] == stats["crc_errors_backup"] == 0
    assert stats["crc_errors_remote"] >= LEFT_AFTER
    until(lambda: pages.donor["slabs"] == 0, "the donor to be left")
    alarms = pages.device.status["alarms"]
    assert any(cluster.donors[0].address in alarm for alarm in alarms), alarms
    assert pages.read() == pages.pages
    pages.device.remove()


def test_without_a_seal_the_altered_page_is_believed(cluster: Cluster) -> None:
    """As docs/security.md says of `seal = false`; and so the tests above can fail."""
    pages = paging(cluster, seal="false")
    with slabs_of(cluster, pages) as slabs:
        slabs.alter(ALTERATIONS["swapped"])
        found = pages.read()
        assert all(got != right for got, right in zip(found, pages.pages, strict=True))
        assert pages.stats["crc_errors_remote"] == 0
    pages.device.remove()
