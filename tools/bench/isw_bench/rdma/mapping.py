# SPDX-License-Identifier: Apache-2.0
"""How long a donor takes to map a slab that is to be reached by RDMA."""

from __future__ import annotations

import sys
from typing import Any

from infiniswap.system.memory import machine_memory
from infiniswap.units import format_size_short
from isw_bench import paper
from isw_bench.bench import Bench, SkipError
from isw_bench.rdma.place import Place, place
from isw_bench.rdma.sides import OURS, RUN_S
from isw_bench.results import Comparison, Figure, Samples, at_most
from isw_bench.stats import quantile

KEY = "map"
TITLE = "RDMA: a slab mapped, at the donor"

BOUND, PAPER, LATE = "bound", "paper", "registered when it is mapped"
BOUND_MS = 5.0
_COUNT = 3
"""Mappings of each kind in a round; their median counts."""


def run(bench: Bench) -> Comparison:
    """Measures it.

    Raises:
        SkipError: there is no RDMA, or too little memory for any size.
    """
    samples, notes = Samples(), list(_NOTES)
    free_bytes = machine_memory().available_bytes
    sizes = [size for size in bench.settings.slab_sizes if size <= free_bytes // 2]
    for size in bench.settings.slab_sizes:
        if size not in sizes:
            notes.append(
                f"{format_size_short(size)} was left out: of this host's memory "
                f"{format_size_short(free_bytes)} are free, and twice a slab has to be."
            )
    if not sizes:
        raise SkipError("no slab size fits into half of the free memory (--slab-sizes)")
    with place(bench) as at:
        for _ in bench.rounds(KEY):
            for size in sizes:
                bench.await_quiet()
                keep(samples, size, times(bench, at, size))
    ahead = [size for size in sizes if "ahead_ms" in samples.values[name_of(size)]]
    for size in sizes:
        notes.append(note(samples, size))
    found = [line for size in sizes for line in figures(samples, size, size in ahead)]
    return Comparison(KEY, TITLE, found, samples.values, notes=notes)


_NOTES = (
    "The donor's own part, without the control session around it: a free slab put into the "
    "lease's slot, and its registration moved into the lease's domain, or made. What a device "
    "waits for in all is in `device-map`.",
)


def name_of(size_bytes: int) -> str:
    """Our side's, one for each size."""
    return f"{OURS}, {format_size_short(size_bytes)}"


def times(bench: Bench, at: Place, size_bytes: int) -> dict[str, list[float]]:
    """Of one process; see map_slab."""
    argv = [sys.executable, "-m", "isw_bench.rdma.map_slab", "--address", at.address]
    argv += ["--slab-bytes", str(size_bytes), "--count", str(_COUNT)]
    changes = {"PYTHONPATH": str(bench.root / "tools" / "bench")}
    label = f"map slabs of {format_size_short(size_bytes)}"
    with bench.running(label, argv, changes=changes) as child:
        told: Any = child.answer(RUN_S)
    return dict(told)


def keep(samples: Samples, size_bytes: int, told: dict[str, list[float]]) -> None:
    """The medians of one round."""
    mine = {f"{name}_ms": quantile(values, 0.5) for name, values in told.items()}
    if "ahead" in told:
        mine["total_ms"] = quantile(
            [map_ms + key_ms for map_ms, key_ms in zip(told["map"], told["key"], strict=True)], 0.5
        )
    samples.add(name_of(size_bytes), **mine)
    samples.add(f"{BOUND}, {format_size_short(size_bytes)}", ms=BOUND_MS, paper_ms=paper.MAP_MS)


def note(samples: Samples, size_bytes: int) -> str:
    """What the rest took."""
    own = samples.values[name_of(size_bytes)]
    size = format_size_short(size_bytes)
    zeroed = f"zeroing it {quantile(own['scrub_ms'], 0.5):.1f} ms"
    if "ahead_ms" not in own:
        return (
            f"{size}: this device or kernel cannot move registrations, so none is made ahead; "
            f"{zeroed}, behind the answer."
        )
    return (
        f"{size}: registering it ahead took {quantile(own['ahead_ms'], 0.5):.1f} ms and {zeroed}, "
        "while nobody waits."
    )


def figures(samples: Samples, size_bytes: int, ahead: bool) -> list[Figure]:
    """The table's lines of one size."""
    own = samples.values[name_of(size_bytes)]
    bound = samples.values[f"{BOUND}, {format_size_short(size_bytes)}"]
    ours = own["total_ms" if ahead else "late_ms"]
    name = f"map a slab of {format_size_short(size_bytes)}"
    found = [
        Figure(name, "ms", ours, bound["ms"], BOUND, target=at_most(1.0)),
        Figure(name, "ms", ours, bound["paper_ms"], PAPER),
    ]
    if ahead:
        found.append(Figure(name, "ms", ours, own["late_ms"], LATE))
    return found
