# SPDX-License-Identifier: Apache-2.0
"""Compares what far memory brings back with fixed grains, LRU and Belady's optimum, on traces.

The agent's own handlers run, over a kernel and a device that only keep books (replay.c). Their
figures depend on the trace alone, so one round is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from infiniswap.units import GIB, PAGE_BYTES
from isw_bench.bench import Bench, SkipError
from isw_bench.far import traces
from isw_bench.results import Comparison, Figure, Samples, at_most

KEY = "victims"
TITLE = "Far memory: what comes back, on traces of jobs"

SHARES: Final = (50, 25)
"""The budgets, in percent of the job's peak."""
GRAINS: Final = (1, 16, 64, 512)
"""The fixed grains, in pages."""
AGENT, LRU, OPTIMUM, GRAIN = "agent", "lru", "optimum", "best fixed grain"
_FETCH_S: Final = 0.12e-3
"""Seconds for a fetch without its bytes: DuckDB, two processors that the donors share."""
_S_PER_GIB: Final = 1.0
"""Seconds for the bytes, there (docs/benchmarks.md, What was tried)."""
_NOTES: Final = (
    "A trace says which parts a job touched in each 40 ms, in which order, and what it freed. It "
    "does not say how often a part was touched within 40 ms.",
    f"Cost counts {_FETCH_S * 1e3:g} ms for a fetch and {_S_PER_GIB:g} s for a GiB. LRU and the "
    "optimum bring and give up single parts; with a fixed grain whole blocks leave, first in, "
    "first out.",
)

Tally = Mapping[str, int]


def cost_s(tally: Tally) -> float:
    """Estimates how long the fetches take with their bytes."""
    return tally["fetches"] * _FETCH_S + read_gib(tally) * _S_PER_GIB


def read_gib(tally: Tally) -> float:
    """Returns how many GiB were read back."""
    return tally["pages"] * PAGE_BYTES / GIB


def run(bench: Bench) -> Comparison:
    """Plays every trace with every budget.

    Raises:
        SkipError: there is no trace, or the program was not built.
    """
    figures: list[Figure] = []
    samples = Samples()
    if not traces.packed():
        raise SkipError(f"no trace is in {traces.DIRECTORY}")
    for path in traces.packed():
        name = path.name.removesuffix(traces.SUFFIX)
        unpacked = bench.work / f"{name}.trace"
        traces.unpack(path, unpacked)
        for share in SHARES:
            bench.say(f"{name}, {share} %")
            row = f"{name}-{share}"
            tallies = play(bench, unpacked, share)
            figures += _figures(row, tallies)
            for rival, tally in tallies.items():
                samples.add(f"{row}: {rival}", **{key: float(tally[key]) for key in tally})
        unpacked.unlink()
    return Comparison(KEY, TITLE, figures, samples.values, notes=_NOTES)


def play(bench: Bench, trace: Path, share: int) -> dict[str, Tally]:
    """Returns what each policy brought back: fetches, whole blocks among them, and pages."""
    grains = [f"fixed:{grain}" for grain in GRAINS]
    argv = [bench.program("far-replay"), str(trace), str(share)]
    tallies: dict[str, Any] = bench.json_of("replay", [*argv, AGENT, LRU, OPTIMUM, *grains])
    best = min(grains, key=lambda grain: cost_s(tallies[grain]))
    return {name: tallies[name] for name in (AGENT, LRU, OPTIMUM)} | {GRAIN: tallies[best]}


def _figures(row: str, tallies: Mapping[str, Tally]) -> list[Figure]:
    agent = tallies[AGENT]
    cost = Figure(
        f"{row}: cost", "s", [cost_s(agent)], [cost_s(tallies[GRAIN])], GRAIN,
        target=at_most(1.0), our_name=AGENT, must=at_most(2.0),
    )  # fmt: skip
    return [
        cost,
        *(
            Figure(
                f"{row}: read back",
                "GiB",
                [read_gib(agent)],
                [read_gib(tallies[rival])],
                rival,
                our_name=AGENT,
            )
            for rival in (LRU, OPTIMUM)
        ),
    ]
