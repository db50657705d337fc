# SPDX-License-Identifier: Apache-2.0
"""Consumers of a donor that lies: the right bytes come from the backup, the donor is given up."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
from support.devices.cluster import SLAB, WAIT_S, Cluster, Device, until
from support.devices.nbd_bytes import ACK, DISC, FLUSH, open_export, read, reply, request, write
from support.donors.lying_donor import LIES, LyingDonor, lying_donor, truth

from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

SIZE = 16 * MIB
PAGE = 4096
PAGES = range(0, SIZE // PAGE, 16)
"""Those that are used, spread over the device."""


@pytest.fixture
def liar() -> Iterator[LyingDonor]:
    with lying_donor(SLAB, 4) as donor:
        yield donor


class Pages:
    """What a device must hold, and a connection to it."""

    def __init__(self, device: Device, seed: int) -> None:
        self._random = random.Random(seed)
        self._client = socket.socket(socket.AF_UNIX)
        self._client.settimeout(WAIT_S)
        self._client.connect(str(device.run / "nbd.sock"))
        assert open_export(self._client, "") == ACK
        self.truth: dict[int, bytes] = {}

    def write(self) -> None:
        for page in self._random.sample(PAGES, len(PAGES)):
            data = self._random.randbytes(PAGE)
            assert write(self._client, page * PAGE, data) == 0
            self.truth[page] = data

    def flush(self) -> None:
        self._client.sendall(request(FLUSH, cookie=5))
        assert reply(self._client) == (0, 5)

    def check(self) -> None:
        for page in self._random.sample(sorted(self.truth), len(self.truth)):
            assert read(self._client, page * PAGE, PAGE) == self.truth[page], page

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(OSError):
            self._client.sendall(request(DISC))
        self._client.close()


def start(cluster: Cluster, liar: LyingDonor) -> Device:
    cluster.env["INFINISWAP_DEVICE_REQUEST_MS"] = "500"
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "0.3"
    name = cluster.name()
    cluster.ok(
        *("device", "start", name, "--frontend", "nbd-socket"),
        *("--donors", liar.address, "--size", str(SIZE)),
    )
    return Device(cluster, name)


def mapped(device: Device) -> int:
    return int(device.status["slabs"]["mapped"])


def fill(device: Device, pages: Pages) -> None:
    """Until both slabs are on the donor and hold pages that only need to be read back."""

    def both() -> bool:
        pages.write()
        return mapped(device) == SIZE // SLAB

    until(both, "both slabs on the donor")
    pages.write()
    pages.flush()
    assert device.status["pages_on_donors"] > 0


@pytest.mark.parametrize("lie", LIES)
def test_right_bytes_and_the_donor_given_up(lie: str, cluster: Cluster, liar: LyingDonor) -> None:
    device = start(cluster, liar)
    with Pages(device, seed=1) as pages:
        fill(device, pages)
        maps = liar.store.counters["maps"]
        liar.store.lie = LIES[lie]

        def distrusted() -> bool:
            pages.check()
            pages.write()
            return any("given up" in alarm for alarm in device.status["alarms"])

        until(distrusted, f"the end of trust after {lie}")
        until(lambda: mapped(device) == 0, "its slabs to be unmapped")
        pages.check()
        stats = device.status["stats"]
        assert stats["requests_failed"] == 0
        fallbacks = ("fallback_error", "fallback_suspended", "fallback_unmapped")
        assert sum(stats[name] for name in fallbacks) > 0
        # Two slabs, tried anew a few times at most.
        assert liar.store.counters["maps"] - maps < 20
    log = device.log
    assert "Traceback" not in log, log[log.index("Traceback") - 1000 :]
    device.remove()


def test_a_donor_that_mends_its_ways_is_used_again(cluster: Cluster, liar: LyingDonor) -> None:
    device = start(cluster, liar)
    with Pages(device, seed=2) as pages:
        fill(device, pages)
        liar.store.lie = LIES["wrong_cookie"]

        def distrusted() -> bool:
            pages.check()
            return mapped(device) == 0

        until(distrusted, "the end of trust")
        liar.store.lie = truth
        fill(device, pages)
        pages.check()
        assert device.status["alarms"] == []
    device.remove()


def test_a_donor_that_floods_its_sessions_is_given_up(cluster: Cluster, liar: LyingDonor) -> None:
    device = start(cluster, liar)
    with Pages(device, seed=4) as pages:
        fill(device, pages)
        liar.floods = True

        def distrusted() -> bool:
            pages.check()
            pages.write()
            return any("floods its control sessions" in alarm for alarm in device.status["alarms"])

        until(distrusted, "the end of trust")
        until(lambda: mapped(device) == 0, "its slabs to be unmapped")
        pages.check()
        assert device.status["donors"][0]["sessions_broken"]["flood"] >= 3
        assert device.status["stats"]["requests_failed"] == 0
    assert "more than" in device.log
    assert "Traceback" not in device.log
    device.remove()


def test_a_donor_that_forgets_what_it_acknowledged(cluster: Cluster, liar: LyingDonor) -> None:
    device = start(cluster, liar)
    liar.store.stores = False
    with Pages(device, seed=3) as pages:
        fill(device, pages)
        for _ in range(3):
            pages.check()
            pages.write()
        stats = device.status["stats"]
        assert stats["crc_errors_remote"] > 0
        assert stats["requests_failed"] == 0
    device.remove()
