# SPDX-License-Identifier: Apache-2.0
"""What was measured, beside what was wanted: figures, verdicts, table and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from isw_bench.stats import Spread, pair_ratios, spread


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the median ratio, from the project's issue."""

    relation: Literal["<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{'≤' if self.relation == '<=' else '≥'} {self.bound:g}"

    def met(self, ratio: float) -> bool:
        """Whether a ratio keeps the bound."""
        return ratio <= self.bound if self.relation == "<=" else ratio >= self.bound


def at_most(bound: float) -> Target:
    """The ratio must not be above."""
    return Target("<=", bound)


def at_least(bound: float) -> Target:
    """The ratio must not be below."""
    return Target(">=", bound)


VERDICTS = ("pass", "must", "miss", "no win", "")
"""What a figure came to: "must" keeps only the weaker bound, "no win" keeps the bounds by other
means than those that are measured, "" has none."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: the same thing measured on both sides, once a round.

    Attributes:
        name: what was measured.
        unit: of both sides' values.
        ours, theirs: one value per round.
        our_name, their_name: who.
        better: which direction is good.
        target: on the median of the rounds' ratios; None: for information.
        must: a weaker bound, below which the result is a failure; None: the target is the only one.
        no_win: why a ratio that keeps its bounds does not count; empty: it does.
    """

    name: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    their_name: str
    better: Literal["lower", "higher"] = "lower"
    target: Target | None = None
    our_name: str = "infiniswap"
    must: Target | None = None
    no_win: str = ""

    @property
    def ratio(self) -> Spread:
        """Of the rounds' ratios ours / theirs."""
        return spread(pair_ratios(self.ours, self.theirs))

    @property
    def best_ratio(self) -> float:
        """Each side's best round: what is left where others have disturbed the rest."""
        best = max if self.better == "higher" else min
        return pair_ratios([best(self.ours)], [best(self.theirs)])[0]

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.target is None:
            return ""
        bounds, median = (self.target, self.must or self.target), self.ratio.median
        target_met, must_met = (bound.met(median) for bound in bounds)
        if not must_met:
            return "miss"
        if self.no_win:
            return "no win"
        return "pass" if target_met else "must"

    @property
    def wanted(self) -> str:
        """The bounds as text, "" without a target."""
        if self.target is None:
            return ""
        return f"{self.target} (must: {self.must})" if self.must else str(self.target)

    @property
    def advantage(self) -> float:
        """How many times better than the other side (below 1: worse)."""
        ratio = self.ratio.median
        if self.better == "higher":
            return ratio
        return 1.0 / ratio if ratio else math.inf


@dataclass(frozen=True, slots=True)
class TimeLine:
    """What one run got done, slice by slice.

    Attributes:
        panel: lines of one picture.
        side: who; the last one of a panel is what the picture is about.
        slice_s: length of a slice, in seconds.
        values: one per slice.
        events: seconds since the first slice at which something was done to it.
    """

    panel: str
    side: str
    slice_s: float
    values: Sequence[float]
    events: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything one comparison gave.

    Attributes:
        key: how it is selected.
        title: a heading.
        figures: the lines of its table.
        samples: every value by side and name, one per round; also what no figure uses.
        notes: what a reader must know to judge the figures.
        commands: what was run, by label.
        skipped: why it could not run; empty when it ran.
        elapsed_s: how long it took.
        lines: time lines, in the order of the runs.
        failed: what went wrong although there are figures; empty: nothing.
    """

    key: str
    title: str
    figures: Sequence[Figure] = ()
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    commands: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
    elapsed_s: float = 0.0
    lines: Sequence[TimeLine] = ()
    failed: str = ""


class Samples:
    """Values by side and name, in the order of the rounds."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[float]]] = {}

    def add(self, side: str, **values: float) -> None:
        """One round's values of a side."""
        for name, value in values.items():
            self.values.setdefault(side, {}).setdefault(name, []).append(float(value))

    def of(self, side: str, name: str) -> list[float]:
        """All rounds of one value."""
        return self.values[side][name]

    def has(self, side: str) -> bool:
        """Whether this side was measured."""
        return side in self.values


def figure_json(figure: Figure) -> dict[str, Any]:
    """A figure as plain data."""
    ratio = figure.ratio
    return {
        "name": figure.name,
        "unit": figure.unit,
        "better": figure.better,
        "ours": {"name": figure.our_name, **_spread_json(spread(figure.ours))},
        "theirs": {"name": figure.their_name, **_spread_json(spread(figure.theirs))},
        "ratio": _spread_json(ratio),
        "best_ratio": figure.best_ratio if math.isfinite(figure.best_ratio) else None,
        "target": None if figure.target is None else str(figure.target),
        "must": None if figure.must is None else str(figure.must),
        "no_win": figure.no_win,
        "verdict": figure.verdict,
    }


def _spread_json(values: Spread) -> dict[str, float | int | None]:
    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "median": plain(values.median),
        "q1": plain(values.q1),
        "q3": plain(values.q3),
        "count": values.count,
    }


def as_json(comparisons: Sequence[Comparison], about: dict[str, Any]) -> dict[str, Any]:
    """A whole run as plain data. `about`: machine, versions, settings."""
    return {
        "schema": 1,
        **about,
        "comparisons": {
            comparison.key: {
                "title": comparison.title,
                "skipped": comparison.skipped,
                "failed": comparison.failed,
                "elapsed_s": round(comparison.elapsed_s, 2),
                "figures": [figure_json(figure) for figure in comparison.figures],
                "notes": list(comparison.notes),
                "commands": comparison.commands,
                "samples": comparison.samples,
                "lines": [asdict(line) for line in comparison.lines],
            }
            for comparison in comparisons
        },
    }


# ------------------------------------------------------------------------------- table


def format_value(value: float) -> str:
    """About three digits."""
    if not math.isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def format_spread(values: Spread) -> str:
    """The median, and the interquartile range behind it."""
    if values.q1 == values.q3:
        return format_value(values.median)
    return f"{format_value(values.median)} [{format_value(values.q1)}-{format_value(values.q3)}]"


HEADINGS = ("figure", "ours", "other side", "ratio [IQR]", "best", "target", "")


def cells(figure: Figure) -> tuple[str, ...]:
    """One row, for HEADINGS."""
    return (
        f"{figure.name}, {figure.unit}",
        format_value(spread(figure.ours).median),
        f"{figure.their_name}: {format_value(spread(figure.theirs).median)}",
        format_spread(figure.ratio),
        format_value(figure.best_ratio),
        figure.wanted,
        f"{figure.verdict}: {figure.no_win}" if figure.verdict == "no win" else figure.verdict,
    )


def markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables as text for docs/benchmarks.md."""
    lines: list[str] = []
    for comparison in comparisons:
        lines += [f"### {comparison.title}", ""]
        if comparison.skipped:
            lines += [f"Not run: {comparison.skipped}", ""]
            continue
        lines += [
            "| " + " | ".join(HEADINGS) + " |",
            "| --- | ---: | ---: | ---: | ---: | --- | --- |",
            *("| " + " | ".join(cells(figure)) + " |" for figure in comparison.figures),
            "",
        ]
        lines += [f"- {note}" for note in comparison.notes]
        if comparison.notes:
            lines.append("")
    return "\n".join(lines)
