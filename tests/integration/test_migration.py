# SPDX-License-Identifier: Apache-2.0
"""A donor gives its slabs back and their pages go to another one: real daemons, a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.devices.cluster import SLAB, Cluster, Donor, until
from support.devices.copied import Copied

from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 32 * MIB
SLABS = SIZE // SLAB


class Filled:
    """A device whose slabs all are at the first of two donors, with every page."""

    def __init__(self, cluster: Cluster, directory: Path, *args: str) -> None:
        self.cluster = cluster
        self.leaving, self.other = cluster.donor(), cluster.donor()
        cluster.ok("donor", "drain", self.other.address)
        self.device = cluster.start(
            *("--frontend", "nbd-socket", *args),
            size=str(SIZE),
            INFINISWAP_DEVICE_HEDGE_MS="0",  # what is read from the backup shall mean something
        )
        contents = Copied(self.device, directory)
        contents.draw(SIZE)
        self.read_back = contents.read_back

        def filled() -> bool:
            # A page that is written before its slab is mapped stays on the disk.
            contents.write()
            return self.device.status["pages_on_donors"] == SIZE // PAGE_BYTES

        until(filled, "pages that are all there")
        assert self.slabs_at(self.leaving) == SLABS

    def slabs_at(self, donor: Donor) -> int:
        rows = self.device.status["donors"]
        return int(next(row["slabs"] for row in rows if row["address"] == donor.address))

    def drain(self, donor: Donor) -> None:
        self.cluster.ok("donor", "drain", donor.address)

    def undrain(self, donor: Donor) -> None:
        self.cluster.ok("donor", "undrain", donor.address)
        until(lambda: "no longer draining" in donor.log, "a donor that lends again")


@pytest.mark.parametrize("backup", [True, False])
def test_after_a_drain_everything_is_read_from_the_other_donor(
    cluster: Cluster, tmp_path: Path, backup: bool
) -> None:
    filled = Filled(cluster, tmp_path, *([] if backup else ["--backup", "none"]))
    filled.undrain(filled.other)
    filled.drain(filled.leaving)
    assert filled.slabs_at(filled.leaving) == 0
    assert filled.slabs_at(filled.other) == SLABS
    counted = filled.read_back()
    assert counted["pages_in_backup"] == counted["requests_failed"] == 0
    status = filled.device.status
    assert status["stats"]["pages_migrated"] == SIZE // PAGE_BYTES
    assert not any("lost" in alarm for alarm in status["alarms"])
    # The drained one holds nothing of it any more: it may go.
    assert filled.leaving.end() == 0
    assert filled.read_back()["pages_in_backup"] == 0


def test_without_room_and_without_a_backup_the_slabs_stay_until_there_is_room(
    cluster: Cluster, tmp_path: Path
) -> None:
    filled = Filled(cluster, tmp_path, "--backup", "none")
    cluster.ok("donor", "drain", "--no-wait", filled.leaving.address)
    until(lambda: "nowhere else" in filled.leaving.log, "a refusal")
    assert filled.slabs_at(filled.leaving) == SLABS
    filled.undrain(filled.other)
    until(lambda: filled.slabs_at(filled.leaving) == 0, "slabs that have moved")
    assert filled.read_back()["requests_failed"] == 0
