# SPDX-License-Identifier: Apache-2.0
"""A job that writes many times its limit: how fast each kind of swap area takes its pages."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

from infiniswap.device.jobs.attendant import Attendant
from infiniswap.units import MIB, format_size_short
from isw_bench import areas
from isw_bench.areas import Area
from isw_bench.bench import Bench, SkipError, require_root
from isw_bench.results import Comparison, Figure, Samples, at_least, at_most
from isw_bench.swapped import check_swapped, swapped_on, undisturbed

KEY = "page-out"
TITLE = "Sustained page-out: a job that writes many times its limit"

THREADS = (1, 2, 4)
_SIDES = (areas.OURS, areas.FLOOR, areas.DISK, areas.ZRAM)
_RUN_S = 600.0
_ROOM = 1.25
"""Size of each area, as a multiple of what the job fills."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or no FUSE.
    """
    require_root("page-out")
    settings = bench.settings
    sized = bench.with_settings(
        replace(
            settings,
            swap_bytes=settings.page_out_bytes,
            swap_limit_bytes=settings.page_out_limit_bytes,
            swap_device_bytes=round(settings.page_out_bytes * _ROOM) // MIB * MIB,
        )
    )
    samples, notes = Samples(), _notes(sized)
    with contextlib.ExitStack() as stack:
        ready: list[Area] = []
        for name, make in areas.ALL:
            if name not in _SIDES:
                continue
            bench.say(f"page-out: setting up {name}")
            try:
                ready.append(stack.enter_context(make(sized)))
            except SkipError as error:
                notes.append(f"{name} was left out: {error}.")
        for _ in bench.rounds("page-out"):
            for threads in THREADS:
                for area in ready:
                    samples.add(area.name, **_measure(sized, area, threads))
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


def _notes(bench: Bench) -> list[str]:
    settings = bench.settings
    return [
        f"{format_size_short(settings.swap_bytes)} filled once by 1, 2 and 4 threads in a cgroup "
        f"of {format_size_short(settings.swap_limit_bytes)}, on {os.cpu_count()} processors, no "
        "thread pinned, no huge pages; half of each page is zeros. The rate counts what is above "
        "the limit. Donors on loopback. Beside the job on our area runs an attendant, as with "
        "`infiniswap run`.",
        "The fault after: random touches right after the fill, compared with the same when "
        "everything has come to rest.",
    ]


def _measure(bench: Bench, area: Area, threads: int) -> dict[str, float]:
    """One fill, by this many threads; the names of the values end with their number."""
    told = undisturbed(bench, lambda: _fill(bench, area, threads))
    measured = {
        "out_mb_per_s": told["out_mb_s"],
        "job_cpu_s": told["cpu_s"],
        "after_p99_us": told["after_us"]["p99"],
        "rested_p99_us": told["rested_us"]["p99"],
    }
    return {f"{name}_{threads}": value for name, value in measured.items()}


def _fill(bench: Bench, area: Area, threads: int) -> Any:
    settings = bench.settings
    argv = [bench.program("page-out"), "--threads", str(threads)]
    argv += ["--bytes", str(settings.swap_bytes), "--limit", str(settings.swap_limit_bytes)]
    argv += ["--touch-ms", str(round(settings.seconds * 1000))]
    with swapped_on(bench, area) as cgroup, contextlib.ExitStack() as stack:
        argv += ["--cgroup", str(cgroup.path)]
        with bench.running(f"page-out to {area.name}", argv) as child:
            attendant = Attendant(cgroup, wanted=area.name == areas.OURS)
            stack.callback(attendant.end)
            attendant.look(settings.swap_limit_bytes)
            child.line(_RUN_S)
            check_swapped(bench, area)
            area.settle()
            child.tell("")
            return child.answer(_RUN_S)


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    if not samples.has(areas.OURS):
        return []
    ours = samples.values[areas.OURS]
    found = []
    for threads in THREADS:
        name = f"page-out, {threads} thread{'s' if threads > 1 else ''}"
        for other in _SIDES[1:]:
            if not samples.has(other):
                continue
            theirs = samples.values[other]
            found.append(
                Figure(
                    name,
                    "MB/s",
                    ours[f"out_mb_per_s_{threads}"],
                    theirs[f"out_mb_per_s_{threads}"],
                    other,
                    better="higher",
                    target=at_least(1.0) if (other, threads) == (areas.DISK, 1) else None,
                )
            )
    found.append(
        Figure(
            "the fault after, p99",
            "µs",
            ours["after_p99_us_1"],
            ours["rested_p99_us_1"],
            "after a rest",
            target=at_most(2.0),
        )
    )
    return found
