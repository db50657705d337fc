# SPDX-License-Identifier: Apache-2.0
"""What an invocation leaves for its reader: a line for each cell, and at the end results.json,
results.md and results.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infiniswap.units import format_size_short
from isw_bench.apps import slowdown_plot, summary, tables
from isw_bench.apps.jobs import AppJob
from isw_bench.apps.plan import OK, Cell


def short(result: Mapping[str, Any]) -> str:
    """How a cell went."""
    if result["status"] != OK:
        return f"{result['status']} {result.get('why', '')}".strip()
    speed = f", {result['ops_per_s']:.0f} op/s" if "ops_per_s" in result else ""
    paged = result["paged"]
    return (
        f"{result['elapsed_s']:.1f} s{speed}, {format_size_short(paged['in_bytes'])} paged in, "
        f"{format_size_short(paged['out_bytes'])} out"
    )


def write(
    results: Mapping[Cell, Mapping[str, Any]],
    jobs: Sequence[tuple[AppJob, float]],
    about: Mapping[str, Any],
    output: Path,
) -> None:
    """Sums up all cells there are.

    Args:
        results: of this invocation and earlier ones.
        jobs: with the size of each.
        about: machine, versions, command.
        output: directory.
    """
    described = [(job.key, job.title, job.described(size)) for job, size in jobs]
    found = summary.summarize(results, described)
    front_ends = {result["front_end"] for result in results.values() if result.get("front_end")}
    about = {**about, "front_end": " or ".join(sorted(front_ends)) or "none"}
    data = {"schema": 1, **about, "jobs": found}
    (output / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    (output / "results.md").write_text(tables.everything(about, found))
    made = ["results.json", "results.md"]
    if slowdown_plot.draw(found, output / "results.png", tables.caption(about, found)):
        made.append("results.png")
    print(tables.overview(found))
    print(f"bench: wrote {', '.join(made)} in {output}")
