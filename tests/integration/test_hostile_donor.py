# SPDX-License-Identifier: Apache-2.0
"""Consumers of a donor that lies: the right bytes come from the backup, the donor is given up."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices import nbd_bytes as nbd
from support.devices.cluster import SLAB, Cluster, Device, until
from support.devices.nbd_client import connected
from support.donors.lying_donor import LIES, LyingDonor, lying_donor, truth

from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

SIZE = 16 * MIB
PAGE = 4096
PAGES = range(0, SIZE // PAGE, 16)
"""Those that are used, spread over the device."""


@pytest.fixture
def liar(tmp_path: Path, secret_file: Path) -> Iterator[LyingDonor]:
    with lying_donor(SLAB, 4, tmp_path / "state", secret_file) as donor:
        yield donor


@pytest.fixture
def cluster(cluster: Cluster, secret_file: Path) -> Cluster:
    """With the secret of the test cluster."""
    cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(secret_file)
    return cluster


class Pages:
    """What a device must hold, and a connection to it. Everything begins on the donor."""

    def __init__(self, device: Device, client: socket.socket) -> None:
        self.device = device
        self._client = client
        self._random = random.Random(1)
        self._truth: dict[int, bytes] = {}

    @property
    def status(self) -> Any:
        return self.device.status

    def write(self) -> None:
        for page in self._random.sample(PAGES, len(PAGES)):
            data = self._random.randbytes(PAGE)
            assert nbd.write(self._client, page * PAGE, data) == 0
            self._truth[page] = data

    def check(self) -> None:
        for page in self._random.sample(sorted(self._truth), len(self._truth)):
            assert nbd.read(self._client, page * PAGE, PAGE) == self._truth[page], page

    def is_mapped(self, slabs: int) -> bool:
        return int(self.status["slabs"]["mapped"]) == slabs

    def fill(self) -> None:
        """Until both slabs are on the donor and hold pages that only need to be read back."""

        def both() -> bool:
            self.write()
            return self.is_mapped(SIZE // SLAB)

        until(both, "both slabs on the donor")
        self.write()
        self._client.sendall(nbd.request(nbd.FLUSH, cookie=5))
        assert nbd.reply(self._client) == (0, 5)
        assert self.status["pages_on_donors"] > 0

    def until_given_up(self, words: str) -> None:
        """Until the donor is, with an alarm of these words; every byte is right meanwhile."""

        def told() -> bool:
            self.check()
            self.write()
            return any(words in alarm for alarm in self.status["alarms"])

        until(told, "the end of trust")
        until(lambda: self.is_mapped(0), "its slabs to be unmapped")
        self.check()
        assert self.status["stats"]["requests_failed"] == 0


@pytest.fixture
def pages(cluster: Cluster, liar: LyingDonor) -> Iterator[Pages]:
    cluster.env["INFINISWAP_DEVICE_REQUEST_MS"] = "500"
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "0.3"
    options = ("--frontend", "nbd-socket", "--donors", liar.address)
    device = cluster.start(*options, size=str(SIZE))
    with connected(device.socket) as client:
        yield Pages(device, client)
        with contextlib.suppress(OSError):
            client.sendall(nbd.request(nbd.DISC))


@pytest.mark.parametrize("lie", LIES)
def test_right_bytes_and_the_donor_given_up(lie: str, pages: Pages, liar: LyingDonor) -> None:
    pages.fill()
    maps = liar.store.counters["maps"]
    liar.store.lie = LIES[lie]
    pages.until_given_up("given up")
    stats = pages.status["stats"]
    fallbacks = ("fallback_error", "fallback_suspended", "fallback_unmapped")
    assert sum(stats[name] for name in fallbacks) > 0
    # Two slabs, tried anew a few times at most.
    assert liar.store.counters["maps"] - maps < 20


def test_a_donor_that_mends_its_ways_is_used_again(pages: Pages, liar: LyingDonor) -> None:
    pages.fill()
    liar.store.lie = LIES["wrong_cookie"]

    def distrusted() -> bool:
        pages.check()
        return pages.is_mapped(0)

    until(distrusted, "the end of trust")
    liar.store.lie = truth
    pages.fill()
    pages.check()
    assert pages.status["alarms"] == []


def test_a_donor_that_floods_its_sessions_is_given_up(pages: Pages, liar: LyingDonor) -> None:
    pages.fill()
    liar.floods = True
    pages.until_given_up("floods its control sessions")
    assert pages.status["donors"][0]["sessions_broken"]["flood"] >= 3
    assert "more than" in pages.device.log


def test_a_donor_that_forgets_what_it_acknowledged(pages: Pages, liar: LyingDonor) -> None:
    liar.store.stores = False
    pages.fill()
    for _ in range(3):
        pages.check()
        pages.write()
    stats = pages.status["stats"]
    assert stats["crc_errors_remote"] > 0
    assert stats["requests_failed"] == 0
