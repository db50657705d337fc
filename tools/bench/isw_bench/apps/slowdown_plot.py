# SPDX-License-Identifier: Apache-2.0
"""One picture of a run: how much slower each job was with each rival."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isw_bench import plotting
from isw_bench.apps import plan

_COLOURS = {
    plan.OURS: "#1f5fbf",
    plan.OURS_PLAIN: "#6a7f99",
    plan.OURS_ZSWAP: "#12a4a8",
    plan.OURS_CLOUD: "#7fb0ee",
    plan.DISK: "#b3261e",
    plan.CLOUD: "#e8908a",
    plan.ZRAM: "#2a7f3f",
    plan.ZSWAP: "#8fbf5a",
    plan.SPILL: "#8a6d3b",
}
_INCHES_WIDE = 9.0
_INCHES_PER_LINE = 0.45
_DPI = 100
_APART = 0.11
"""Of two rivals in a line."""


def lines(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What is drawn, from the top: a label, and slowdowns by rival."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for job in summary.values():
        for share, cells in job["shares"].items():
            good = {
                name: rival["slowdown"]
                for name, rival in cells["rivals"].items()
                if rival["status"] == plan.OK and rival["slowdown"]
            }
            if good:
                found.append((f"{job['title']}, {share} %", good))
    return found


def draw(summary: Mapping[str, Any], path: Path, caption: str) -> bool:
    """Writes the PNG. False when there is nothing to draw or there is no matplotlib."""
    drawn = lines(summary)
    pyplot = plotting.pyplot()
    if not drawn or pyplot is None:
        return False

    figure, axes = pyplot.subplots(
        figsize=(_INCHES_WIDE, 2.0 + _INCHES_PER_LINE * len(drawn)), layout="constrained"
    )
    for place, (_, slowdowns) in enumerate(drawn):
        for name, found in slowdowns.items():
            at = place + _APART * (plan.ORDER.index(name) - (len(plan.ORDER) - 1) / 2)
            axes.plot([found["q1"], found["q3"]], [at, at], color=_COLOURS[name], linewidth=3,
                      alpha=0.5)  # fmt: skip
            label = name if name not in axes.get_legend_handles_labels()[1] else None
            axes.plot([found["median"]], [at], "o", color=_COLOURS[name], markersize=5, label=label)
    axes.set_yticks(range(len(drawn)), [label for label, _ in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times as long as without a limit (log); bar: quartiles")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value < 10 else "")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.grid(axis="x", which="both", linewidth=0.3)
    figure.legend(fontsize=7, loc="outside lower center", ncols=4)
    axes.set_title(textwrap.fill(caption, 100), fontsize=8)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return True
