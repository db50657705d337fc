# SPDX-License-Identifier: Apache-2.0
"""Somebody on the path of a running device's pages, who alters what its donor has said.

Each forged page has the CRC-32C of the right one. Without seals that is enough to pass for it.
Attacks on the engine alone: tests/c/test_engine_seal.c. Over RDMA:
tests/vm/guest/test_altered_slabs.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest
from support.devices.cluster import SLAB, Cluster, until
from support.devices.page_by_page import PageByPage
from support.donors.checksum import crc32c, with_crc_of
from support.donors.forger import Forger, flipped, of_another_device, rolled_back, swapped

from infiniswap.units import PAGE_BYTES

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
]

PAGES = 64
LEFT_AFTER = 16
"""Bad pages, after which a device leaves a donor: docs/security.md."""


def test_a_page_is_given_the_checksum_of_another() -> None:
    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283  # RFC 3720's
    one, other = os.urandom(PAGE_BYTES), os.urandom(PAGE_BYTES)
    forged = with_crc_of(one, other)
    assert forged[:-4] == one[:-4]
    assert crc32c(forged) == crc32c(other)
    assert with_crc_of(other, other) == other


def attacked(cluster: Cluster, forger: Forger, *args: str, seal: str = "true") -> PageByPage:
    """A device whose pages go by that way, and are read from the donor first."""
    device = cluster.start(
        "--frontend", "fuse", "--transport", "tcp", "--donors", forger.address, *args,
        size=str(SLAB),
        INFINISWAP_DEVICE_HEDGE_MS="0",
        INFINISWAP_DEVICE_SEAL=seal,
    )  # fmt: skip
    return PageByPage(device, PAGES)


ATTACKS = ("flipped", "swapped", "rolled back", "of another device")


@pytest.fixture
def forger(shared_cluster: Cluster) -> Iterator[Forger]:
    own = Forger(shared_cluster.donors[0])
    yield own
    own.close()


@pytest.fixture
def another(shared_cluster: Cluster) -> Iterator[Forger]:
    """On the path of another device to the same donor."""
    own = Forger(shared_cluster.donors[0], "127.0.0.3")
    yield own
    own.close()


@pytest.fixture(params=ATTACKS)
def attack(
    request: pytest.FixtureRequest, shared_cluster: Cluster, another: Forger
) -> Callable[[Forger, int, bytes], bytes]:
    """What the other pages are."""
    if request.param == "of another device":
        attacked(shared_cluster, another)
        return of_another_device(another)
    found = {"flipped": flipped, "swapped": swapped, "rolled back": rolled_back}
    return found[request.param]


Attack = Callable[[Forger, int, bytes], bytes]


def test_with_a_backup_every_byte_is_right(
    shared_cluster: Cluster, forger: Forger, attack: Attack
) -> None:
    victim = attacked(shared_cluster, forger)
    assert victim.read() == victim.pages
    assert victim.stats["pages_in_remote"] >= PAGES // 2
    forger.forge = attack
    for _ in range(2):
        assert victim.read() == victim.pages
    assert forger.forged >= 2 * LEFT_AFTER  # each was read again before it was not believed
    stats = victim.stats
    assert stats["requests_failed"] == stats["crc_errors_backup"] == 0
    assert stats["crc_errors_remote"] >= LEFT_AFTER
    until(lambda: victim.donor["slabs"] == 0, "the donor to be left")
    alarms = victim.device.status["alarms"]
    assert any(forger.address in alarm for alarm in alarms), alarms
    # It comes back, and is believed as far as it is right.
    forger.forge = None
    assert victim.read() == victim.pages


def test_without_a_backup_no_byte_is_wrong(
    shared_cluster: Cluster, forger: Forger, attack: Attack
) -> None:
    victim = attacked(shared_cluster, forger, "--backup", "none")
    assert victim.read() == victim.pages
    forger.forge = attack
    assert victim.read() == [errno.EIO] * PAGES
    stats = victim.stats
    assert stats["crc_errors_remote"] >= PAGES
    assert stats["requests_failed"] >= PAGES
    # The only copies of the pages stay where they are, and are read again when nobody alters them.
    assert victim.donor["slabs"] == 1
    alarms = victim.device.status["alarms"]
    assert any(forger.address in alarm for alarm in alarms), alarms
    forger.forge = None
    assert victim.read() == victim.pages


def test_without_a_seal_the_forgery_is_believed(
    shared_cluster: Cluster, forger: Forger, attack: Attack
) -> None:
    """As docs/security.md says of `seal = false`; and so the tests above can fail."""
    victim = attacked(shared_cluster, forger, seal="false")
    forger.forge = attack
    found = victim.read()
    assert all(got != right for got, right in zip(found, victim.pages, strict=True))
    assert victim.stats["crc_errors_remote"] == 0
