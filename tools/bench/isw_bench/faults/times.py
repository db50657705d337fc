# SPDX-License-Identifier: Apache-2.0
"""How long it takes to map a slab and to take one back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isw_bench import areas, paper
from isw_bench.bench import Bench, require_root
from isw_bench.cluster import device
from isw_bench.faults.donors import EVICTING, Donors, donors
from isw_bench.results import Comparison, Figure, Samples, at_most
from isw_bench.stats import quantile
from isw_bench.timed_device import VARIABLE

KEY = "times"
TITLE = "Times: to map a slab, and to take one back"

_MODULE = "isw_bench.timed_device"
OURS, PAPER, ROUND_TRIP = "infiniswap", "paper", "control round trip"


def run(bench: Bench) -> Comparison:
    """Measures it; each round is a new device on the same donors.

    Raises:
        SkipError: not root.
    """
    require_root("a device")
    samples = Samples()
    size_bytes, slab_bytes = bench.settings.swap_device_bytes, bench.settings.slab_bytes
    with donors(bench, EVICTING) as pool:
        for number in bench.rounds(KEY):
            bench.await_quiet()
            file = bench.work / f"times{number}.json"
            with device(
                bench, pool.addresses, size_bytes, slab_bytes, module=_MODULE,
                changes={VARIABLE: str(file)},
            ) as own:  # fmt: skip
                areas.map_all(bench, own)
                evicted = evict_all(pool, size_bytes // slab_bytes)
            keep(samples, mapped_in(file), evicted)
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=_NOTES)


_NOTES = (
    "Map: from the wish for a donor to the slab being in use: two donors asked, the better one "
    "asked for the slab; the first slab of a donor also makes the lease and its connections.",
    "Evict: from the donor's wish to its memory being free: the owners of two slabs asked how "
    "active they are, EVICT without time to copy the slab, DONE, the slot fenced. No job ran "
    "meanwhile.",
    "A control round trip is one question of the donor to the device and its answer, in the same "
    "processes: most of either is made of those. The paper's figures are of its own machines.",
)


def mapped_in(file: Path) -> list[dict[str, Any]]:
    """What the device wrote."""
    return [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]


def evict_all(pool: Donors, count: int) -> list[dict[str, float]]:
    """One after the other; they get other donors meanwhile, so there are always some left."""
    found = [pool.evict(urgent=True) for _ in range(count)]
    return [told for told in found if told]


def keep(samples: Samples, mapped: list[dict[str, Any]], evicted: list[dict[str, float]]) -> None:
    """The medians of one round."""
    first = [told["map_ms"] for told in mapped if told["is_first"]]
    later = [told["map_ms"] for told in mapped if not told["is_first"]]
    samples.add(
        OURS,
        map_ms=quantile(later, 0.5),
        map_ms_p99=quantile(later, 0.99),
        map_first_ms=quantile(first, 0.5),
        evict_ms=quantile([told["evict_ms"] for told in evicted], 0.5),
        evict_ms_p99=quantile([told["evict_ms"] for told in evicted], 0.99),
        mapped=len(mapped),
        evicted=len(evicted),
    )
    samples.add(ROUND_TRIP, ms=quantile([told["ask_ms"] for told in evicted], 0.5))
    samples.add(PAPER, map_ms=paper.MAP_MS, evict_ms=paper.EVICT_MS)


def figures(samples: Samples) -> list[Figure]:
    """The table."""

    def line(name: str, key: str, other: str, other_key: str, target: bool = False) -> Figure:
        bound = at_most(1.0) if target else None
        ours, theirs = samples.of(OURS, key), samples.of(other, other_key)
        return Figure(name, "ms", ours, theirs, other, target=bound)

    return [
        line("map a slab, median", "map_ms", PAPER, "map_ms", True),
        line("map a slab, median", "map_ms", ROUND_TRIP, "ms"),
        line("map the first slab of a donor, median", "map_first_ms", PAPER, "map_ms", True),
        line("evict a slab, median", "evict_ms", PAPER, "evict_ms", True),
        line("evict a slab, median", "evict_ms", ROUND_TRIP, "ms"),
        line("evict a slab, p99", "evict_ms_p99", ROUND_TRIP, "ms"),
    ]
