# SPDX-License-Identifier: Apache-2.0
"""One picture of a run: how many times better or worse than the other side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isw_bench import plotting
from isw_bench.results import Comparison, Figure

_COLOURS = {
    "pass": "#2a7f3f",
    "must": "#b8860b",
    "miss": "#b3261e",
    "no win": "#7a4b8c",
    "": "#5b6b7a",
}
_INCHES_WIDE = 9.0
_INCHES_PER_LINE = 0.3
_DPI = 100


def bars(comparisons: Sequence[Comparison]) -> list[tuple[str, Figure]]:
    """What is drawn: label and figure, from the top."""
    return [
        (f"{figure.name} | {figure.their_name}", figure)
        for comparison in comparisons
        for figure in comparison.figures
        if math.isfinite(figure.advantage) and figure.advantage > 0
    ]


def advantages(figure: Figure) -> tuple[float, float, float]:
    """The median ratio and its quartiles as "times better"."""
    ratio = figure.ratio
    if figure.better == "higher":
        return ratio.median, ratio.q1, ratio.q3
    return 1.0 / ratio.median, 1.0 / ratio.q3, 1.0 / ratio.q1


def draw(comparisons: Sequence[Comparison], path: Path, caption: str) -> bool:
    """Writes the PNG. False when there is nothing to draw or there is no matplotlib."""
    lines = bars(comparisons)
    pyplot = plotting.pyplot()
    if not lines or pyplot is None:
        return False

    figure, axes = pyplot.subplots(
        figsize=(_INCHES_WIDE, 1.4 + _INCHES_PER_LINE * len(lines)), layout="constrained"
    )
    draw_bars(axes, lines)
    axes.set_title(textwrap.fill(caption, 64), fontsize=9)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return True


def draw_bars(axes: Any, lines: Sequence[tuple[str, Figure]]) -> None:
    """The figures, one below the other."""
    for place, (_, line) in enumerate(lines):
        _draw_line(axes, place, line)
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times better than the other side (log), bar: quartiles, tick: target")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(axis="x", which="both", linewidth=0.3)


def _draw_line(axes: Any, place: int, line: Figure) -> None:
    median, low, high = advantages(line)
    colour = _COLOURS[line.verdict]
    axes.plot([low, high], [place, place], color=colour, linewidth=4, alpha=0.4)
    axes.plot([median], [place], "o", color=colour, markersize=5)
    axes.annotate(
        f"{median:.2f}", (median, place), xytext=(0, 5), textcoords="offset points", fontsize=7,
        ha="center",
    )  # fmt: skip
    if line.target is not None:
        bound = line.target.bound if line.better == "higher" else 1.0 / line.target.bound
        axes.plot([bound], [place], "|", color="black", markersize=11)
