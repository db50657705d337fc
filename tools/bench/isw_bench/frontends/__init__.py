# SPDX-License-Identifier: Apache-2.0
"""`make bench-frontends`: the kernel's ways to a device beside each other, and what the death of
the process behind them costs."""

from __future__ import annotations

from isw_bench.bench import Settings
from isw_bench.frontends import pause, sides, speed
from isw_bench.machine import PEERS
from isw_bench.suite import Option, Suite


def _check(settings: Settings) -> str:
    if settings.swap_device_bytes <= 0 or settings.swap_device_bytes % sides.SLAB_BYTES:
        return "--device-size must be a multiple of 8M"
    return ""


SUITE = Suite(
    target="bench-frontends",
    description="Compares the front ends ublk, nbd and fuse, as far as this host has them; a "
    "virtual machine of tools/vm has all (docs/benchmarks.md). Rounds of `pause` are kills.",
    comparisons={module.KEY: module for module in (speed, pause)},
    timed=frozenset({speed.KEY}),
    packages={**PEERS, "nbd-client": "nbd-client"},
    options=(Option("--device-size", "swap_device_bytes", "64M", "of each device"),),
    check=_check,
)
