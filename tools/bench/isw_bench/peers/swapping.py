# SPDX-License-Identifier: Apache-2.0
"""A job that swaps: what a fault costs with each kind of swap area."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC, try_read_text
from infiniswap.units import format_size_short
from isw_bench import areas
from isw_bench.areas import Area
from isw_bench.bench import Bench, SkipError, require_root
from isw_bench.results import Comparison, Figure, Samples, at_least, at_most
from isw_bench.swapped import check_swapped, swapped_on, undisturbed

KEY = "swap"
TITLE = "Swap faults: a job with twice the memory of its limit"

_FILL_S = 300.0


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or no FUSE.
    """
    require_root("swap")
    samples = Samples()
    notes = []
    with contextlib.ExitStack() as stack:
        ready: list[Area] = []
        for name, make in areas.ALL:
            bench.say(f"swap: setting up {name}")
            try:
                ready.append(stack.enter_context(make(bench)))
            except SkipError as error:
                notes.append(f"{name} was left out: {error}.")
        for _ in bench.rounds("swap"):
            for area in ready:
                once = functools.partial(measure, bench, area)
                samples.add(area.name, **undisturbed(bench, once))
    return Comparison(
        KEY, TITLE, figures(samples), samples.values, notes=[*_notes(bench, samples), *notes]
    )


def _notes(bench: Bench, samples: Samples) -> list[str]:
    settings = bench.settings
    cluster = (try_read_text(PROC / "sys/vm/page-cluster") or "?").strip()
    notes = [
        f"{format_size_short(settings.swap_bytes)} filled in a cgroup of "
        f"{format_size_short(settings.swap_limit_bytes)}, then read front to end, then touched at "
        f"random; one page a fault, vm.page-cluster {cluster}, no discard, half of each page is "
        "zeros. Only touches that the kernel counted as a major fault count as faults.",
        "All areas but the disk's file lie on a loop device with direct I/O and the same queue "
        "settings. The disk is this machine's own, the cloud volume the same disk limited to "
        "3000 requests and 125 MB/s.",
    ]
    if samples.has(areas.OURS):
        share = min(samples.of(areas.OURS, "from_donors"))
        notes.append(f"Of our page-ins donors served {share:.1%} (the lowest of the rounds).")
    return notes


def measure(bench: Bench, area: Area) -> dict[str, float]:
    """One round on one area.

    Raises:
        ElsewhereError: the pages went elsewhere.
        SystemCallError: a program failed.
    """
    with swapped_on(bench, area) as cgroup:
        before = area.counters()
        told = _run_job(bench, area, cgroup)
        after = area.counters()
    measured = {
        "fault_p50_us": told["fault_us"]["p50"],
        "fault_p99_us": told["fault_us"]["p99"],
        "fault_mean_us": told["fault_us"]["mean"],
        "faults": told["fault_us"]["count"],
        "touch_mean_us": told["touch_us"]["mean"],
        "sweep_mb_per_s": told["sweep_mb_s"],
        "sweep_pages": told["sweep_pages"],
        "fill_s": told["fill_s"],
    }
    if before:
        came = {name: after[name] - before[name] for name in after}
        measured["from_donors"] = came["pages_in_remote"] / max(1, came["pages_in"])
    return measured


def _run_job(bench: Bench, area: Area, cgroup: MemoryCgroup) -> Any:
    settings = bench.settings
    ms = str(round(settings.seconds * 2000))
    argv = [bench.program("swapfault"), "--cgroup", str(cgroup.path)]
    argv += ["--bytes", str(settings.swap_bytes), "--sweep-ms", ms, "--touch-ms", ms]
    with bench.running(f"job on {area.name}", argv) as child:
        child.line(_FILL_S)
        check_swapped(bench, area)
        area.settle()
        child.tell("")
        return child.answer(_FILL_S)


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    if not samples.has(areas.OURS):
        return []
    found = []
    fault, sweep = "fault_p50_us", "sweep_mb_per_s"
    ours = samples.values[areas.OURS]
    for other, _ in areas.ALL[1:]:
        if not samples.has(other):
            continue
        peer = other == areas.NBDFUSE
        theirs = samples.values[other]
        found.append(
            Figure(
                "random fault, p50",
                "µs",
                ours[fault],
                theirs[fault],
                other,
                target=at_most(0.75) if peer else None,
            )
        )
        for name, key in (("mean", "fault_mean_us"), ("p99", "fault_p99_us")):
            if peer or name == "mean":  # what a limit costs shows only in the mean
                found.append(Figure(f"random fault, {name}", "µs", ours[key], theirs[key], other))
        found.append(
            Figure(
                "sequential read-back",
                "MB/s",
                ours[sweep],
                theirs[sweep],
                other,
                better="higher",
                target=at_least(1.6) if peer else None,
            )
        )
    return found
