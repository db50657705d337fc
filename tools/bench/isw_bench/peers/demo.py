# SPDX-License-Identifier: Apache-2.0
"""`infiniswap demo`: a real job at half its memory, with infiniswap and with a slow disk."""

from __future__ import annotations

import json
import sys

from isw_bench.bench import Bench, require_root
from isw_bench.results import Comparison, Figure, Samples, at_least

KEY = "demo"
TITLE = "Demo: the job at half its memory"

_RUN_S = 3600.0


def run(bench: Bench) -> Comparison:
    """Measures it; each round is one whole demo, which runs the job each way.

    Raises:
        SkipError: not root.
    """
    require_root("the demo")
    samples = Samples()
    throttle = ""
    file = bench.work / "demo.json"
    argv = [sys.executable, "-m", "infiniswap", "demo", "--keep", "--json", str(file)]
    argv += bench.settings.demo_args
    # --keep: every round works on the same data; it goes away with this run's directory.
    cache = {"XDG_CACHE_HOME": str(bench.work / "cache")}
    for _ in bench.rounds("demo"):
        bench.run("demo", argv, _RUN_S, changes=cache)
        told = json.loads(file.read_text(encoding="utf-8"))
        throttle = throttle or told["throttle"]
        for leg in told["legs"]:
            samples.add(
                leg["name"],
                elapsed_s=leg["elapsed_s"],
                page_in_mb=leg["page_in_bytes"] / 1e6,
                page_out_mb=leg["page_out_bytes"] / 1e6,
            )
        ours = next(leg for leg in told["legs"] if leg["name"] == "infiniswap")
        samples.add(
            "infiniswap",
            page_in_p50_us=ours["page_in_us_p50"] or 0.0,
            page_in_p99_us=ours["page_in_us_p99"] or 0.0,
            donors_share=told["donors_share"] or 0.0,
        )
    notes = ["A ratio of 2 means that the job on the disk took twice as long as with infiniswap."]
    if throttle:
        notes.append(f"The disk was not as slow as a cloud volume: {throttle}.")
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


def figures(samples: Samples) -> list[Figure]:
    """The table. The disk's time stands in front, so that the ratio is how much faster we are."""
    ours = samples.of("infiniswap", "elapsed_s")
    return [
        Figure(
            "cloud volume's time / infiniswap's",
            "s",
            samples.of("disk", "elapsed_s"),
            ours,
            "infiniswap",
            better="higher",
            target=at_least(2.0),
            our_name="cloud volume",
        ),
        Figure(
            "slowdown against enough memory",
            "s",
            ours,
            samples.of("unlimited", "elapsed_s"),
            "enough memory",
        ),
    ]
