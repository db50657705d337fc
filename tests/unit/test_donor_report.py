# SPDX-License-Identifier: Apache-2.0
"""A donor's status as an answer: infiniswap.donor.report."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.donors.hostile_donor import lease, status

from infiniswap.control import messages as m
from infiniswap.control.service import SESSIONS_MAX
from infiniswap.donor.report import fitting
from infiniswap.fields import SLOTS_MAX

U53_MAX = (1 << 53) - 1


def made(leases: int, name: str) -> m.Status:
    """With that many leases, numbers as long as they get."""
    rows = [
        lease(
            lease=U53_MAX - number,
            device_name=name[:32],
            host_name=name,
            address="[2001:0db8:1111:2222:3333:4444:5555:6666]:65535",
            epoch=U53_MAX,
            slots_max=SLOTS_MAX,
            slots_mapped=number,
            connections=1000,
            read_bytes=U53_MAX,
            write_bytes=U53_MAX,
        )
        for number in range(leases)
    ]
    counters = {f"a_counter_with_a_long_name_{number}": U53_MAX for number in range(300)}
    degraded = ["x" * 512] * 16
    said = status(leases=rows, counters=counters, degraded=degraded)
    return msgspec.json.decode(json.dumps(said), type=m.Status)


def test_as_many_devices_as_a_donor_serves_fit_into_its_status() -> None:
    whole = made(SESSIONS_MAX, "h" * 64)
    assert fitting(whole) == whole
    assert len(m.encode(whole)) <= m.MESSAGE_BYTES_MAX


@pytest.mark.parametrize("name", ["h" * 64, "\U0001f600" * 128], ids=["hosts", "attackers"])
def test_a_status_that_would_be_too_long_leaves_the_smallest_leases_out(name: str) -> None:
    whole = made(20_000, name)
    said = fitting(whole)
    encoded = m.encode(said)
    assert len(encoded) <= m.MESSAGE_BYTES_MAX
    assert m.decode_body(encoded, m.Status) == said
    assert len(said.leases) > 400
    assert said.leases_left_out == 20_000 - len(said.leases)
    # As before but for those that hold fewer slabs.
    assert said.leases == whole.leases[-len(said.leases) :]
