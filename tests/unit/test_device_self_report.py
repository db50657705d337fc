# SPDX-License-Identifier: Apache-2.0
"""What a device tells donors of itself: infiniswap.device.process.self_report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.devices.specs import device_spec

from infiniswap import config as configuration
from infiniswap.device.api import FarRow
from infiniswap.device.process import self_report
from infiniswap.device.process.self_report import AT_LEAST_S, SelfReport
from infiniswap.device.slabs.alarms import Alarms
from infiniswap.engine.protocol import EngineFigures

BOUNDS_NS = [1000, 50_000, 1_000_000]


class Device:
    """Parts of one, as far as the report asks them.

    Attributes:
        counts, reads: of the engine: totals, and page-ins in each bucket of latency.
        now_s: the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.counts = {"pages_in_remote": 0, "pages_in_backup": 0, "pages_out": 0}
        self.reads = [0, 0, 0]
        self.alarms = Alarms()
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(self_report, "time", clock)
        spec = device_spec(configuration.Config())
        self.far: FarRow | None = None
        far = SimpleNamespace(row=lambda: self.far)
        self.report = SelfReport(spec, cast(Any, self), cast(Any, self), cast(Any, far))

    def figures(self) -> EngineFigures:
        return EngineFigures(
            dict(self.counts), {"waited_read_latency": list(self.reads)}, BOUNDS_NS
        )

    def slab_states(self) -> dict[str, int]:
        return {"suspended": 3}

    def told(self, after_s: float = AT_LEAST_S) -> Any:
        self.now_s += after_s
        return self.report.figures()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_totals_and_the_time_that_they_took(device: Device) -> None:
    device.counts |= {"pages_in_remote": 5, "pages_in_backup": 2, "pages_out": 9}
    device.alarms["x"] = "an alarm"
    said = device.told(4.0)
    assert (said.uptime_s, said.suspended, said.alarms) == (4.0, 3, 1)
    assert (said.in_donors_pages, said.in_disk_pages, said.out_pages) == (5, 2, 9)


def test_far_memory_in_use_is_told(device: Device) -> None:
    assert device.told().far_bytes == 0
    device.far = FarRow(bytes=8 << 20, used_bytes=6 << 20, jobs=1, processes=1)
    assert device.told().far_bytes == 6 << 20


def test_latency_is_that_of_the_last_page_ins(device: Device) -> None:
    device.reads = [0, 0, 90]
    assert device.told().page_in_us_p50 == 1000.0
    device.reads = [0, 9, 91]  # since then nine quick ones and a slow one
    said = device.told()
    assert (said.page_in_us_p50, said.page_in_us_p99) == (50.0, 1000.0)
    assert device.told().page_in_us_p50 is None


def test_several_donors_that_ask_at_once_are_told_the_same(device: Device) -> None:
    device.reads = [1, 0, 0]
    first = device.told()
    device.reads = [1, 1, 0]
    assert device.told(AT_LEAST_S / 2) is first
    assert device.told(AT_LEAST_S / 2).page_in_us_p50 == 50.0
