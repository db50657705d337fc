# SPDX-License-Identifier: Apache-2.0
"""The contents of a device, written and read back by nbdcopy through its socket."""

from __future__ import annotations

import os
from pathlib import Path

from infiniswap.units import PAGE_BYTES
from support.devices.cluster import WAIT_S, Device, until
from support.machine.ran import ran


def nbdcopy(*args: object) -> None:
    """Must succeed."""
    done = ran("nbdcopy", *map(str, args), wait_s=WAIT_S)
    assert done.returncode == 0, done.stderr


def for_want_of_donors(counted: dict[str, int]) -> int:
    """Pages from the backup, but for those for which the device had the choice."""
    return counted["pages_in_backup"] - counted["fallback_quicker"] - counted["fallback_measured"]


class Copied:
    """What is on a device with the front end nbd-socket; at first nothing.

    Args:
        device: that was started.
        directory: for its contents, and what is read back.
    """

    def __init__(self, device: Device, directory: Path) -> None:
        self._device = device
        self._original, self._back = directory / "original", directory / "back"

    def draw(self, size_bytes: int) -> None:
        """Other contents, for `write`."""
        self._original.write_bytes(os.urandom(size_bytes))

    def write(self) -> None:
        """All of it, to where it is safe."""
        nbdcopy("--flush", self._original, self._device.uri)

    def fill(self, size_bytes: int) -> None:
        """Other contents, every page of which is on a donor in the end.

        A page that is written before its slab is mapped stays on the disk.
        """
        self.draw(size_bytes)

        def filled() -> bool:
            self.write()
            return int(self._device.status["pages_on_donors"]) == size_bytes // PAGE_BYTES

        until(filled, "pages that are all there")

    def read_back(self) -> dict[str, int]:
        """Reads everything, checks it, and returns what that added to the counters."""
        before = self._device.status["stats"]
        nbdcopy(self._device.uri, self._back)
        assert self._back.read_bytes() == self._original.read_bytes()
        after = self._device.status["stats"]
        return {key: after[key] - before[key] for key in after}
