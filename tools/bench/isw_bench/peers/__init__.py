# SPDX-License-Identifier: Apache-2.0
"""`make bench`: beside what others do with the same network, memory and disk."""

from __future__ import annotations

import shlex

from infiniswap.units import PAGE_BYTES
from isw_bench.apps.jobs import FULL
from isw_bench.bench import Settings
from isw_bench.far import area as far
from isw_bench.far import victims
from isw_bench.far.jobs import SIZES
from isw_bench.far.rows import ROWS, chosen
from isw_bench.machine import PEERS
from isw_bench.peers import (
    compressed,
    demo,
    donor,
    engine,
    page_out,
    process,
    sealed,
    swapping,
)
from isw_bench.suite import Option, Suite


def _check(settings: Settings) -> str:
    if settings.idle_s <= 0:
        return "--idle-seconds must be positive"
    if settings.donor_bytes % (4 * 64 * PAGE_BYTES):
        return "--donor-size must be a multiple of 1M"
    if settings.swap_limit_bytes >= settings.swap_bytes:
        return "--swap-limit must be less than --swap-size, or nothing is swapped"
    if settings.page_out_limit_bytes >= settings.page_out_bytes:
        return "--page-out-limit must be less than --page-out-size, or nothing is paged out"
    if settings.swap_device_bytes < 2 * (settings.swap_bytes - settings.swap_limit_bytes):
        return "--swap-device must be at least twice of what is swapped"
    if settings.far_size not in SIZES:
        return f"--size must be one of {', '.join(SIZES)}"
    try:
        chosen(settings.far_rows)
    except ValueError as error:
        return f"--rows: {error}"
    return ""


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


_MODULES = (donor, engine, sealed, swapping, page_out, compressed, process, demo, far, victims)
SUITE = Suite(
    target="bench",
    description="Compares Infiniswap with its floor, its peers and disks.",
    comparisons={module.KEY: module for module in _MODULES},
    timed=frozenset(
        {donor.KEY, engine.KEY, sealed.KEY, swapping.KEY, page_out.KEY, compressed.KEY}
    ),
    packages=PEERS,
    options=(
        Option("--donor-size", "donor_bytes", "256M", "store of the server comparisons"),
        Option("--swap-size", "swap_bytes", "512M", "what the swapping job fills"),
        Option("--swap-limit", "swap_limit_bytes", "256M", "its memory limit"),
        Option("--swap-device", "swap_device_bytes", "1G", "size of each swap area"),
        Option("--page-out-size", "page_out_bytes", "4G", "what the job of page-out fills"),
        Option("--page-out-limit", "page_out_limit_bytes", "512M", "its memory limit"),
        Option("--device-size", "process_bytes", "4G", "of the device whose memory is read"),
        Option("--idle-seconds", "idle_s", "20", "watched per round", float),
        Option("--demo-args", "demo_args", "", "options for `infiniswap demo`", _words),
        Option(
            "--rows",
            "far_rows",
            "",
            f"of far, with commas between them: {', '.join(row.name for row in ROWS)}; pandas "
            "stands for pandas-half and pandas-quarter, and so on (default: all)",
            _names,
        ),
        Option("--size", "far_size", FULL, f"of the jobs of far: {', '.join(SIZES)}", str),
    ),
    check=_check,
    seconds=1.0,
)
