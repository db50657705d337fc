# SPDX-License-Identifier: Apache-2.0
"""A job one of whose six donors is killed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from isw_bench import paper
from isw_bench.bench import Bench, require_root
from isw_bench.faults import consumer as consumers
from isw_bench.faults import jobs
from isw_bench.faults.consumer import Clock, Consumer
from isw_bench.results import Comparison, Figure, Samples, TimeLine, at_least

KEY = "donor-death"
TITLE = "Donor death: a job one of whose six donors is killed"

DIES_AT = 0.25
"""Share of the run."""

Choose = Callable[[Consumer, Clock], str]
"""Address of the donor that will die; may take up to a second of the run."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or the disk cannot be limited.
    """
    require_root("a job that swaps")
    samples, lines = Samples(), list[TimeLine]()
    rng = Random(1)

    def any_of_them(consumer: Consumer, _clock: Clock) -> str:
        return rng.choice([str(row["address"]) for row in holding(consumer)])

    measure(bench, samples, lines, (KEY, TITLE), any_of_them, 0.0)
    return Comparison(
        KEY, TITLE, figures(samples), samples.values, notes=notes(bench, samples), lines=lines
    )


def holding(consumer: Consumer) -> list[dict[str, Any]]:
    """The device's donors that hold slabs."""
    return [row for row in consumer.device.status()["donors"] if row["slabs"]]


def measure(
    bench: Bench,
    samples: Samples,
    lines: list[TimeLine],
    names: tuple[str, str],
    choose: Choose,
    calm_s: float,
) -> None:
    """All rounds. The donor dies at DIES_AT of the time that the job is at its peak."""
    key, title = names
    at_s = calm_s + DIES_AT * (bench.settings.seconds - calm_s)
    for name, backup in consumers.BACKUPS:
        with consumers.consumer(bench, backup) as consumer:
            for number in bench.rounds(f"{key}, backup on the {name}"):
                died: list[str] = []

                def script(
                    clock: Clock, consumer: Consumer = consumer, died: list[str] = died
                ) -> list[float]:
                    clock.wait_until(max(0.0, at_s - 1.0))
                    victim = choose(consumer, clock)
                    clock.wait_until(at_s)
                    consumer.pool.kill(victim)
                    died.append(victim)
                    return [clock.now_s()]

                pair = jobs.pair(consumer, script, seed=number, calm_s=calm_s)
                consumer.pool.revive(died[0])
                jobs.keep(samples, lines, title, name, pair, calm_s)
                jobs.keep_recovery(samples, name, pair, calm_s)


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    return table(samples, paper.LOST_WITH_DONOR)


def table(samples: Samples, lost: float) -> list[Figure]:
    """The figures of a donor's death, beside a share of throughput that the paper lost by it."""
    found = []
    for name, _ in consumers.BACKUPS:
        target = at_least(1.0 - lost)
        found.append(jobs.throughput(samples, name, "throughput over the job", target))
        found.append(jobs.worst_round(samples, name, 1.0 - paper.LOST_WITH_DONOR_MAX))
        found.append(jobs.lowest(samples, name))
        found.append(jobs.recovery(samples, name))
    return found


def notes(bench: Bench, samples: Samples) -> list[str]:
    """What one must know."""
    return [
        *jobs.notes(bench),
        f"A random one of the donors that hold slabs gets SIGKILL after {DIES_AT:.0%} of the run: "
        "its connections are reset, as when a daemon dies; a cable that was pulled shows only when "
        "a request is late (device.request_ms, before that device.hedge_ms).",
        *(jobs.recovery_note(samples, name) for name, _ in consumers.BACKUPS),
    ]
