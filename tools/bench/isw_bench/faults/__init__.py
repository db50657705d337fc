# SPDX-License-Identifier: Apache-2.0
"""What faults cost, in the shape of the paper's evaluation: `make bench-faults`.

Each comparison runs the same job without and with the fault by turns. `timeline` is pure; `donors`
and `consumer` are both ends of the memory; `evicting_donor` and `timed_device` are the product's
own processes with one thing more each: they do, or time, what nobody else can ask for.
"""

from __future__ import annotations

from infiniswap.units import MIB
from isw_bench.bench import Settings
from isw_bench.faults import cache, death, eviction, host, peak, time_line_plot, times
from isw_bench.suite import Option, Suite

_SECONDS_MIN = 2.0
_HOST_BYTES_MIN = 256 * MIB


def _check(settings: Settings) -> str:
    if settings.seconds < _SECONDS_MIN:
        return f"--seconds must be {_SECONDS_MIN:g} or more, or nothing can recover"
    if settings.swap_limit_bytes >= settings.swap_bytes:
        return "--job-limit must be less than --job-size, or nothing is swapped"
    if settings.swap_device_bytes < 2 * (settings.swap_bytes - settings.swap_limit_bytes):
        return "--device-size must be at least twice of what is swapped"
    if settings.slab_bytes < MIB or settings.swap_device_bytes < 6 * settings.slab_bytes:
        return "--slab must be 1M or more, and leave a slab for each of six donors"
    if settings.swap_device_bytes % settings.slab_bytes:
        return "--device-size must be a multiple of --slab"
    if settings.host_bytes < _HOST_BYTES_MIN:
        return "--host-memory must be 256M or more"
    return ""


SUITE = Suite(
    target="bench-faults",
    description="What evictions, dying donors and a donor's own needs cost.",
    comparisons={module.KEY: module for module in (eviction, death, peak, host, cache, times)},
    timed=frozenset({eviction.KEY, death.KEY, peak.KEY, host.KEY, times.KEY}),
    packages={"redis-benchmark": "redis-tools"},
    options=(
        Option("--job-size", "swap_bytes", "256M", "what the consumer's job fills"),
        Option("--job-limit", "swap_limit_bytes", "128M", "its memory limit"),
        Option("--device-size", "swap_device_bytes", "384M", "of the consumer's device"),
        Option("--slab", "slab_bytes", "16M", "size of a slab"),
        Option("--host-memory", "host_bytes", "768M", "of the lending host"),
    ),
    check=_check,
    rounds=3,
    seconds=7.0,
    draw=time_line_plot.draw,
)
