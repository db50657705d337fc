# SPDX-License-Identifier: Apache-2.0
"""A world without faults: runs whose devices map ahead, and one donor of three slabs."""

from __future__ import annotations

from collections.abc import Callable

from support.devices.stepped_engine import lib

from infiniswap.engine.protocol import SlabState
from simulation.device import SimDevice
from simulation.donor import SimDonor
from simulation.store import SLAB_PAGES
from simulation.world import World

SLABS = 3


class ThreeSlabs(World):
    """Lives what it is told to.

    Args:
        seed: of everything.
        plot: what happens.
    """

    def __init__(self, seed: int, plot: Callable[[ThreeSlabs], None]) -> None:
        super().__init__(seed)
        self._plot = plot

    @property
    def donor(self) -> SimDonor:
        return self.donors[0]

    def _build(self) -> None:
        self._engine_share = 0.15
        self.network.delay_s_max = 0.005
        self.donors.append(SimDonor(self, self.new_rng(), 0, SLABS, None))

    def add_device(self, tenant: str = "", ahead_share: float = 1.0) -> SimDevice:
        number = len(self.devices) + 1
        device = SimDevice(self, self.new_rng(), number, SLABS, True, ahead_share, tenant)
        device.faults = False
        self.devices.append(device)
        return device

    def _live(self) -> None:
        self._plot(self)

    # ------------------------------------------------------------------- what a plot does

    def page_out(self, device: SimDevice, slab: int) -> None:
        """A few pages of a slab, written; returns when every copy is made that is wanted."""
        for number in range(4):
            device.request(lib.ISW_SIM_WRITE, slab * SLAB_PAGES + 3 * number, 3)
        self.until(
            lambda: not device.requests and not any(s.in_flight for s in device.engine.slabs()),
            30.0,
            "pages are written",
        )

    def pages_out_until(self, device: SimDevice, slab: int, done: Callable[[], bool]) -> float:
        """A run that goes on paging to a slab; returns the seconds it took."""
        begun_s = self.loop.now_s
        while True:
            self.page_out(device, slab)
            self.rest(0.05)
            if done():
                return self.loop.now_s - begun_s
            if self.loop.now_s > begun_s + 60.0:
                self.failed(f"not within 60 s: {device.name} slab {slab}\n{self._figure()}")
                self._check()

    def rest(self, seconds: float) -> None:
        end_s = self.loop.now_s + seconds
        self.until(lambda: self.loop.now_s >= end_s, seconds + 1.0, "time passes")

    def mapped(self, device: SimDevice) -> list[int]:
        slabs = device.engine.slabs()
        return [n for n, info in enumerate(slabs) if info.state is SlabState.MAPPED]

    def has(self, device: SimDevice, slab: int) -> bool:
        return slab in self.mapped(device)

    def until_mapped(self, device: SimDevice, slabs: list[int], wait_s: float) -> None:
        """Returns when a device has these, and no others."""
        self.until(lambda: self.mapped(device) == slabs, wait_s, f"{device.name} has {slabs}")
