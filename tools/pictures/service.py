# SPDX-License-Identifier: Apache-2.0
"""Draws how lending follows the latency of a service: infiniswap.policy.slo in closed loop.

PYTHONPATH=tools:. python -m pictures.service FILE.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from infiniswap.policy.slo import SloPolicy

SECONDS = 7200
SETTLE_S = 10.0
SLABS_MAX = 48
BUSY_S = range(2400, 4200)
"""The service itself has more to do."""


@dataclass(frozen=True, slots=True)
class Run:
    """One value a second.

    Attributes:
        latency: as a share of its bound.
        slabs: lent.
    """

    latency: list[float]
    slabs: list[int]


def run(seed: int, *, protected: bool) -> Run:
    """A service that takes 0.6 of its bound on its own, 0.8 while it is busy, and 0.01 more for
    each slab that is lent, with noise of 3 %. Consumers want all slabs."""
    rng, policy = Random(seed), SloPolicy(1.0, SETTLE_S)
    found, mapped = Run([], []), 0
    for second in range(SECONDS):
        own = 0.8 if second in BUSY_S else 0.6
        latency = (own + 0.01 * mapped) * rng.gauss(1.0, 0.03)
        policy.observe(float(second), latency)
        advice = policy.advise(float(second), mapped, SLABS_MAX)
        if protected:
            mapped -= advice.give_back
        if not protected or mapped < advice.mapped_max:
            mapped = min(SLABS_MAX, mapped + 1)
        found.latency.append(latency)
        found.slabs.append(mapped)
    return found


def mean(values: Sequence[float], window: int = 30) -> list[float]:
    """Of so many seconds before each."""
    return [fmean(values[max(0, at - window) : at + 1]) for at in range(len(values))]


def main(path: str) -> None:
    """Writes the file, and prints the figures that docs/policies.md names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for protected, label, colour in (
        (False, "without a bound", "#8c8c8c"),
        (True, "with [daemon.slo]", "#1f6fb4"),
    ):
        made = run(1, protected=protected)
        minutes = [second / 60 for second in range(SECONDS)]
        latency = mean(made.latency)
        above.plot(minutes, latency, color=colour, label=label)
        below.plot(minutes, made.slabs, color=colour, label=label)
        over = sum(value > 1.0 for value in latency) / SECONDS
        quiet = [count for at, count in enumerate(made.slabs) if at not in BUSY_S]
        print(
            f"{label}: above the bound {over:.1%} of the time, {sum(made.slabs) / SECONDS:.1f} "
            f"slabs lent, {sum(quiet) / len(quiet):.1f} while the service is not busy"
        )
    above.axhline(1.0, color="#d1652a", linestyle="--", label="bound")
    above.set_ylabel("latency / bound, mean of 30 s")
    above.legend(loc="upper right")
    below.set_ylabel("slabs lent")
    below.set_xlabel("minutes; the service is busy from 40 to 70")
    below.set_ylim(0)
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1])
