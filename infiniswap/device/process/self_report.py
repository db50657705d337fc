# SPDX-License-Identifier: Apache-2.0
"""What a device tells donors of itself when they ask for its activity: figures for their status."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from infiniswap.control.messages import DeviceFigures
from infiniswap.device.process.far import FarMemory
from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.engine.protocol import Engine, EngineFigures, histogram_quantiles

AT_LEAST_S: Final = 1.0
"""Figures are this old at most before they are taken again: several donors may ask."""


class SelfReport:
    """Takes the figures when they are asked for, and the latency of the time since the last ones.

    Args:
        spec, engine, mapper, far: of the device.
    """

    def __init__(
        self, spec: DeviceSpec, engine: Engine, mapper: SlabMapper, far: FarMemory
    ) -> None:
        self._spec = spec
        self._far = far
        self._engine = engine
        self._mapper = mapper
        self._began_s = time.monotonic()
        self._taken: tuple[float, DeviceFigures] | None = None
        self._buckets: Sequence[int] = ()

    def figures(self) -> DeviceFigures:
        """As of now or of the last second."""
        now_s = time.monotonic()
        if self._taken is None or now_s - self._taken[0] >= AT_LEAST_S:
            self._taken = now_s, self._take(now_s - self._began_s)
        return self._taken[1]

    def _take(self, uptime_s: float) -> DeviceFigures:
        found = self._engine.figures()
        p50_us, p99_us = self._latency_us(found)
        counts, far = found.counts, self._far.row()
        return DeviceFigures(
            uptime_s=round(uptime_s, 3),
            size_bytes=self._spec.engine_bytes,
            slabs=self._spec.slab_count,
            suspended=self._mapper.slab_states()["suspended"],
            in_donors_pages=counts["pages_in_remote"],
            in_disk_pages=counts["pages_in_backup"],
            out_pages=counts["pages_out"],
            page_in_us_p50=p50_us,
            page_in_us_p99=p99_us,
            alarms=len(self._mapper.alarms.values()),
            far_bytes=0 if far is None else far.used_bytes,
        )

    def _latency_us(self, found: EngineFigures) -> tuple[float | None, float | None]:
        """Of page-ins that waited for a donor or the disk since the last time; None: none did."""
        now = found.latency["waited_read_latency"]
        before = self._buckets or [0] * len(now)
        self._buckets = now
        since = [count - old for count, old in zip(now, before, strict=True)]
        if not any(since):
            return None, None
        p50_ns, p99_ns = histogram_quantiles(since, found.latency_bounds_ns, (0.5, 0.99))
        return round(p50_ns / 1000, 1), round(p99_ns / 1000, 1)
