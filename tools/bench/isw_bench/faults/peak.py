# SPDX-License-Identifier: Apache-2.0
"""A job whose most active donor is killed while the job is at its peak."""

from __future__ import annotations

from isw_bench import paper
from isw_bench.bench import Bench, require_root
from isw_bench.faults import consumer as consumers
from isw_bench.faults import death, jobs
from isw_bench.faults.consumer import Clock, Consumer
from isw_bench.results import Comparison, Figure, Samples, TimeLine

KEY = "peak"
TITLE = "Peak: a job whose most active donor is killed at the job's peak"

CALM = 0.25
"""Share of the run in which the job works a quarter of the time only."""

_WATCH_S = 0.5


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: not root, or the disk cannot be limited.
    """
    require_root("a job that swaps")
    samples, lines = Samples(), list[TimeLine]()
    calm_s = CALM * bench.settings.seconds
    death.measure(bench, samples, lines, (KEY, TITLE), most_active, calm_s)
    return Comparison(
        KEY, TITLE, figures(samples), samples.values, notes=notes(bench, samples), lines=lines
    )


def most_active(consumer: Consumer, clock: Clock) -> str:
    """The donor that serves most pages just now."""
    before = _pages(consumer)
    clock.wait_until(clock.now_s() + _WATCH_S)
    after = _pages(consumer)
    return max(after, key=lambda address: after[address] - before.get(address, 0))


def _pages(consumer: Consumer) -> dict[str, int]:
    return {
        str(row["address"]): int(row["read_pages"]) + int(row["write_pages"])
        for row in death.holding(consumer)
    }


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    return death.table(samples, paper.LOST_WITH_DONOR_MAX)


def notes(bench: Bench, samples: Samples) -> list[str]:
    """What one must know."""
    return [
        *jobs.notes(bench),
        f"The first {CALM:.0%} of each run the job works a quarter of the time, then all the time. "
        f"The donor that served most pages in half a second of that gets SIGKILL after "
        f"{death.DIES_AT:.0%} of it.",
        *(jobs.recovery_note(samples, name) for name, _ in consumers.BACKUPS),
    ]
