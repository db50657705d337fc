# SPDX-License-Identifier: Apache-2.0
"""A job that swaps to our device with zswap in front, and without it: when does that help?"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from infiniswap.demo.children import placed
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.memory import memory_hierarchy
from infiniswap.system.zswap import of_host
from infiniswap.units import MIB, format_size_short, round_up
from isw_bench import areas, zswap
from isw_bench.areas import Area
from isw_bench.bench import Bench, SkipError, require_root
from isw_bench.results import Comparison, Figure, Samples
from isw_bench.swapped import check_swapped, swapped_on, undisturbed

KEY = "zswap"
TITLE = "zswap in front: a job with twice the memory of its limit, which counts the pool"

ZEROS = (75, 60, 50, 0)
"""Percent of each page, so that pages shrink to the rest."""
WITH, WITHOUT = "infiniswap + zswap", "infiniswap"
_SWEEP_MS, _TOUCHES_MAX = 100_000, 1_000_000
"""Enough for all of the memory, so that every run begins to touch with the same pages in memory."""
_RUN_S = 300.0


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, no FUSE or no zswap.
    """
    require_root("zswap")
    settings = bench.settings
    limit_bytes = max(settings.swap_limit_bytes, round_up(zswap.limit_bytes_min(), 16 * MIB))
    wanted = zswap.bounded(limit_bytes)
    if wanted is None:
        raise SkipError("this kernel has no zswap")
    sized = bench.with_settings(
        replace(
            settings,
            swap_bytes=2 * limit_bytes,
            swap_limit_bytes=limit_bytes,
            swap_device_bytes=3 * limit_bytes,
        )
    )
    samples = Samples()
    with areas.ours(sized) as area:
        for _ in bench.rounds("zswap"):
            for zeros in ZEROS:
                once = functools.partial(_job, sized, area, zeros)
                samples.add(WITHOUT, **undisturbed(bench, once))
                with zswap.settings(bench.work, bench.scope.interrupts, wanted):
                    samples.add(WITH, **undisturbed(bench, once))
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=_notes(sized, samples))


def _notes(bench: Bench, samples: Samples) -> list[str]:
    settings = bench.settings
    share = ", ".join(
        f"{zeros} %: to {min(samples.of(WITH, f'shrunk_{zeros}')):.0%}" for zeros in ZEROS
    )
    return [
        f"{format_size_short(settings.swap_bytes)} filled in a cgroup of "
        f"{format_size_short(settings.swap_limit_bytes)}, read front to end, then touched at "
        "random without writing. The rest of each page is random bytes. zswap's pool counts "
        "against the limit, and may take 40 % of it.",
        f"Pages with so many zeros shrank so far: {share}.",
    ]


@contextlib.contextmanager
def _counted(bench: Bench, cgroup: MemoryCgroup) -> Iterator[None]:
    """On version 1 a process in the job's cgroup holds as much memory as the pool."""
    if memory_hierarchy().version == 2:
        yield
        return
    argv = placed(zswap.balloon(bench.settings.swap_limit_bytes), [cgroup.path])
    with bench.running("balloon", argv):
        yield


def _job(bench: Bench, area: Area, zeros: int) -> dict[str, float]:
    """One run; the names of the values end with the part of zeros."""
    settings = bench.settings
    argv = [bench.program("swapfault"), "--bytes", str(settings.swap_bytes)]
    argv += ["--zeros", str(zeros), "--sweep-ms", str(_SWEEP_MS)]
    argv += ["--touch-ms", str(round(settings.seconds * 2000)), "--touches-max", str(_TOUCHES_MAX)]
    with swapped_on(bench, area) as cgroup, _counted(bench, cgroup):
        argv += ["--cgroup", str(cgroup.path)]
        with bench.running(f"job on {area.name}, {zeros} % zeros", argv) as child:
            child.line(_RUN_S)
            check_swapped(bench, area)
            area.settle()
            found = of_host()
            child.tell("")
            told: Any = child.answer(_RUN_S)
    measured = {
        "touch_mean_us": told["touch_us"]["mean"],
        "sweep_mb_per_s": told["sweep_mb_s"],
        "fill_s": told["fill_s"],
        "shrunk": (found.shrunk_share if found else None) or 0.0,
    }
    return {f"{name}_{zeros}": value for name, value in measured.items()}


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    if not samples.has(WITH):
        return []
    ours, theirs = samples.values[WITH], samples.values[WITHOUT]
    found = []

    def figure(what: str, unit: str, key: str, zeros: int) -> Figure:
        name, title = f"{key}_{zeros}", f"{what}, {zeros} % zeros"
        return Figure(title, unit, ours[name], theirs[name], WITHOUT, our_name=WITH)

    for zeros in ZEROS:
        sweep = figure("read-back in sequence", "MB/s", "sweep_mb_per_s", zeros)
        found += [
            figure("random touch, mean", "µs", "touch_mean_us", zeros),
            replace(sweep, better="higher"),
            figure("fill", "s", "fill_s", zeros),
        ]
    return found
