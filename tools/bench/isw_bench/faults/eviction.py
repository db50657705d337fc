# SPDX-License-Identifier: Apache-2.0
"""A job whose donors take one slab back every second."""

from __future__ import annotations

from isw_bench import paper
from isw_bench.bench import Bench, require_root
from isw_bench.faults import consumer as consumers
from isw_bench.faults import jobs
from isw_bench.faults.consumer import Clock, Consumer, Script
from isw_bench.faults.donors import EVICTING
from isw_bench.results import Comparison, Figure, Samples, TimeLine, at_least

KEY = "eviction"
TITLE = "Eviction: a job whose donors take one slab back every second"

_PERIOD_S = 1.0


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or the disk cannot be limited.
    """
    require_root("a job that swaps")
    samples, lines = Samples(), list[TimeLine]()
    for name, backup in consumers.BACKUPS:
        with consumers.consumer(bench, backup, EVICTING) as consumer:
            for number in bench.rounds(f"{KEY}, backup on the {name}"):
                taken: list[float] = []
                script = evictions(consumer, bench.settings.seconds, taken)
                pair = jobs.pair(consumer, script, seed=number)
                jobs.keep(samples, lines, TITLE, name, pair)
                samples.add(
                    jobs.fault_side(name),
                    evictions=len(taken),
                    evict_ms_mean=sum(taken) / max(1, len(taken)),
                )
    return Comparison(
        KEY, TITLE, figures(samples), samples.values, notes=notes(bench, samples), lines=lines
    )


def evictions(consumer: Consumer, seconds: float, taken: list[float]) -> Script:
    """One a second, none in the first and in the last; how long each took goes to `taken`."""

    def script(clock: Clock) -> list[float]:
        events = []
        at_s = _PERIOD_S / 2
        while at_s < seconds - _PERIOD_S / 2:
            clock.wait_until(at_s)
            told = consumer.pool.evict()
            if told:
                events.append(clock.now_s())
                taken.append(told["evict_ms"])
            at_s += _PERIOD_S
        return events

    return script


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    found = []
    for name, _ in consumers.BACKUPS:
        target = at_least(1.0 - paper.LOST_PER_EVICTION)
        found.append(jobs.throughput(samples, name, "throughput, one eviction a second", target))
        found.append(jobs.lowest(samples, name))
        found.append(jobs.tail(samples, name))
    return found


def notes(bench: Bench, samples: Samples) -> list[str]:
    """What one must know."""
    settings = bench.settings
    share = settings.slab_bytes / settings.swap_device_bytes
    done = [
        f"{min(counts):.0f} to {max(counts):.0f} slabs a run (backup on the {name})"
        for name, _ in consumers.BACKUPS
        for counts in [samples.of(jobs.fault_side(name), "evictions")]
    ]
    return [
        *jobs.notes(bench),
        f"Evicted were {'; '.join(done)}; a slab is {share:.1%} of the device. The donors have "
        "room: an evicted slab gets another donor at once.",
    ]
