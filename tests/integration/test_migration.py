# SPDX-License-Identifier: Apache-2.0
"""A donor gives its slabs back and their pages go to another one: real daemons, a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.devices.cluster import SLAB, Cluster, until
from support.devices.copied import Copied, for_want_of_donors

from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 32 * MIB
SLABS = SIZE // SLAB


@pytest.mark.parametrize("backup", [(), ("--backup", "none")], ids=["backup", "none"])
def test_after_a_drain_everything_is_read_from_the_other_donor(
    cluster: Cluster, tmp_path: Path, backup: tuple[str, ...]
) -> None:
    leaving, other = cluster.donor(), cluster.donor()
    cluster.ok("donor", "drain", other.address)
    device = cluster.start(
        *("--frontend", "nbd-socket", *backup),
        size=str(SIZE),
        INFINISWAP_DEVICE_HEDGE_MS="0",  # what is read from the backup shall mean something
    )

    def slabs() -> dict[str, int]:
        return {row["address"]: row["slabs"] for row in device.status["donors"]}

    contents = Copied(device, tmp_path)
    contents.fill(SIZE)
    assert slabs() == {leaving.address: SLABS, other.address: 0}
    cluster.ok("donor", "undrain", other.address)
    until(lambda: "no longer draining" in other.log, "a donor that lends again")
    cluster.ok("donor", "drain", leaving.address)
    assert slabs() == {leaving.address: 0, other.address: SLABS}
    counted = contents.read_back()
    assert for_want_of_donors(counted) == counted["requests_failed"] == 0
    status = device.status
    assert status["stats"]["pages_migrated"] == SIZE // PAGE_BYTES
    assert not any("lost" in alarm for alarm in status["alarms"])
    # The drained one holds nothing of it any more: it may go.
    assert leaving.end() == 0
    assert for_want_of_donors(contents.read_back()) == 0
