# SPDX-License-Identifier: Apache-2.0
"""What the comparisons of a consumer's job have in common: pairs of runs, and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infiniswap.units import format_size_short
from isw_bench.bench import Bench
from isw_bench.faults.consumer import SLICE_S, Consumer, Script, nothing
from isw_bench.faults.timeline import (
    RECOVERED_SHARE,
    Run,
    left_s,
    lowest_per_s,
    per_s,
    recovered_s,
    work_lost_s,
)
from isw_bench.results import Figure, Samples, Target, TimeLine, at_least
from isw_bench.stats import pair_ratios

BASE, FAULT = "no fault", "fault"


@dataclass(frozen=True, slots=True)
class Pair:
    """A run without the fault and the next one, with it; and what the job printed."""

    base: Run
    fault: Run
    base_told: dict[str, Any]
    fault_told: dict[str, Any]


def pair(consumer: Consumer, script: Script, *, seed: int, calm_s: float = 0.0) -> Pair:
    """Both runs."""
    base, base_told = consumer.run(nothing, seed=seed, calm_s=calm_s)
    fault, fault_told = consumer.run(script, seed=seed, calm_s=calm_s)
    return Pair(base, fault, base_told, fault_told)


def base_side(backup: str) -> str:
    """Name of a side in the samples."""
    return f"{BASE}, {backup}"


def fault_side(backup: str) -> str:
    """Name of a side in the samples."""
    return f"{FAULT}, {backup}"


def keep(
    samples: Samples,
    lines: list[TimeLine],
    title: str,
    backup: str,
    pair: Pair,
    begin_s: float = 0.0,
) -> None:
    """One round. `begin_s`: since when the job has worked at its peak."""
    panel = f"{title.partition(':')[0]}, backup on the {backup}"
    for side, name, run, told in (
        (base_side(backup), BASE, pair.base, pair.base_told),
        (fault_side(backup), FAULT, pair.fault, pair.fault_told),
    ):
        samples.add(
            side,
            ops_per_s=run.per_s,
            lowest_per_s=lowest_per_s(run, begin_s),
            fault_p50_us=told["fault_us"]["p50"],
            fault_p99_us=told["fault_us"]["p99"],
            faults=told["fault_us"]["count"],
        )
        lines.append(TimeLine(panel, name, run.slice_s, run.ops, run.events))
    samples.add(fault_side(backup), work_lost_s=work_lost_s(pair.base, pair.fault))


def keep_recovery(samples: Samples, backup: str, pair: Pair, begin_s: float = 0.0) -> None:
    """When one round's job was back at its level; both sides in seconds."""
    fault_s = pair.fault.events[0]
    level = per_s(pair.base, begin_s)
    samples.add(fault_side(backup), recovered_s=recovered_s(pair.fault, fault_s, level))
    samples.add(base_side(backup), left_s=left_s(pair.fault, fault_s))


def _figure(samples: Samples, backup: str, name: str, unit: str, key: str, **more: Any) -> Figure:
    return Figure(
        f"{name} (backup: {backup})",
        unit,
        samples.of(fault_side(backup), key),
        samples.of(base_side(backup), key),
        BASE,
        our_name=FAULT,
        **more,
    )


def throughput(samples: Samples, backup: str, name: str, target: Target) -> Figure:
    """Over the whole job."""
    return _figure(samples, backup, name, "op/s", "ops_per_s", better="higher", target=target)


def lowest(samples: Samples, backup: str) -> Figure:
    """The worst second."""
    return _figure(samples, backup, "worst second", "op/s", "lowest_per_s", better="higher")


def tail(samples: Samples, backup: str) -> Figure:
    """Of page faults."""
    return _figure(samples, backup, "page fault, p99", "µs", "fault_p99_us")


def worst_round(samples: Samples, backup: str, bound: float) -> Figure:
    """The round that lost most."""
    ours, theirs = (samples.of(side(backup), "ops_per_s") for side in (fault_side, base_side))
    ratios = pair_ratios(ours, theirs)
    worst = ratios.index(min(ratios))
    return Figure(
        f"throughput, worst round (backup: {backup})",
        "op/s",
        ours[worst : worst + 1],
        theirs[worst : worst + 1],
        BASE,
        better="higher",
        target=at_least(bound),
        our_name=FAULT,
    )


def recovery(samples: Samples, backup: str) -> Figure:
    """Beside what was left of the run, which is what it shows where the job did not recover."""
    return Figure(
        f"recovered after (backup: {backup})",
        "s",
        samples.of(fault_side(backup), "recovered_s"),
        samples.of(base_side(backup), "left_s"),
        "rest of the run",
        our_name=FAULT,
    )


def notes(bench: Bench) -> list[str]:
    """About the job."""
    settings = bench.settings
    return [
        f"Each run: {format_size_short(settings.swap_bytes)} touched at random for "
        f"{settings.seconds:g} s in a cgroup of {format_size_short(settings.swap_limit_bytes)}, a "
        f"fifth of the touched pages changed; a device of "
        f"{format_size_short(settings.swap_device_bytes)} in slabs of "
        f"{format_size_short(settings.slab_bytes)} on six donors, all of it mapped before. "
        f"Slices of {SLICE_S:g} s.",
        "A ratio is throughput with the fault / without it: 0.98 means that 2 % were lost, "
        "averaged over the job. The targets are the paper's figures.",
    ]


def recovery_note(samples: Samples, backup: str) -> str:
    """What does not depend on how long the job went on."""
    lost = sorted(samples.of(fault_side(backup), "work_lost_s"))
    return (
        f"Work lost (backup: {backup}): {lost[0]:.2f} to {lost[-1]:.2f} s of an undisturbed job. "
        f"Recovered: the first second after the worst one "
        f"at {RECOVERED_SHARE:.0%} of the undisturbed run's level."
    )
