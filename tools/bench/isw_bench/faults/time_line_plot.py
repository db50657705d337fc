# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: every figure, and below them the time lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isw_bench import plotting, ratio_plot
from isw_bench.faults.timeline import Run, moving, per_s
from isw_bench.results import Comparison, Figure, TimeLine

_COLUMNS = 2
_INCHES_WIDE = 11.0
_PANEL_INCHES = 2.4
_SMOOTH_S = 0.3
_COLOURS = ("#9aa5b1", "#b3261e")
_DPI = 100
_NARROW = 20.0
"""Ends of the axis closer than this factor leave room for a number at each line."""


def panels(comparisons: Sequence[Comparison]) -> dict[str, list[TimeLine]]:
    """The lines by panel, in their order."""
    found: dict[str, list[TimeLine]] = {}
    for comparison in comparisons:
        for line in comparison.lines:
            found.setdefault(line.panel, []).append(line)
    return found


def labelled(comparisons: Sequence[Comparison]) -> list[tuple[str, Figure]]:
    """What is drawn as bars."""
    return [
        (f"{comparison.key}: {label}", figure)
        for comparison in comparisons
        for label, figure in ratio_plot.bars([comparison])
    ]


def shares(line: TimeLine, level_per_s: float) -> tuple[list[float], list[float]]:
    """Seconds, and throughput as a share of a level: each point is the mean of the time before."""
    run = Run(line.slice_s, [round(value) for value in line.values])
    values = moving(run, _SMOOTH_S)
    return [round(place * line.slice_s + _SMOOTH_S, 3) for place in range(len(values))], [
        value / level_per_s for value in values
    ]


def draw(comparisons: Sequence[Comparison], path: Path, caption: str) -> bool:
    """Writes the PNG. False when there is nothing to draw or there is no matplotlib."""
    bars, lines = labelled(comparisons), panels(comparisons)
    pyplot = plotting.pyplot()
    if not bars or pyplot is None:
        return False

    rows = math.ceil(len(lines) / _COLUMNS)
    bars_inches = 1.2 + 0.3 * len(bars)
    figure = pyplot.figure(
        figsize=(_INCHES_WIDE, bars_inches + _PANEL_INCHES * rows), layout="constrained"
    )
    grid = figure.add_gridspec(
        1 + rows, _COLUMNS, height_ratios=[bars_inches, *[_PANEL_INCHES] * rows]
    )
    axes = figure.add_subplot(grid[0, :])
    ratio_plot.draw_bars(axes, bars)
    low, high = axes.get_xlim()
    told = "2345678" if high < _NARROW * low else "25"
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in told else "")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.set_ylim(len(bars) - 0.3, -0.9)
    axes.set_title(textwrap.fill(caption, 100), fontsize=9)
    for place, (name, own) in enumerate(lines.items()):
        _draw_panel(figure.add_subplot(grid[1 + place // _COLUMNS, place % _COLUMNS]), name, own)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return True


def _draw_panel(axes: Any, name: str, lines: Sequence[TimeLine]) -> None:
    sides = list(dict.fromkeys(line.side for line in lines))
    base = [line for line in lines if line.side == sides[0]]
    levels = [per_s(Run(line.slice_s, [round(v) for v in line.values])) for line in base]
    told: set[str] = set()
    for number, line in enumerate(lines):
        # Each beside the run without a fault of its own round.
        level = levels[min(number // len(sides), len(levels) - 1)] or 1.0
        seconds, values = shares(line, level)
        colour = _COLOURS[min(sides.index(line.side), len(_COLOURS) - 1)]
        label = None if line.side in told else line.side
        told.add(line.side)
        axes.plot(seconds, values, color=colour, linewidth=1.0, alpha=0.8, label=label)
        for event in line.events:
            axes.axvline(event, color="black", linewidth=0.4, linestyle=":")
    axes.set_title(name, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("s", fontsize=7)
    axes.set_ylabel(f"share of the mean of\n“{sides[0]}”", fontsize=7)
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right")
