# SPDX-License-Identifier: Apache-2.0
"""The tables of a simulation. Several seeds give a mean and its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev

from rich.table import Table

from infiniswap.simulation.measures import KINDS, Spread
from infiniswap.simulation.runner import Simulated

_KIND_TEXTS = {
    "own": "used by the hosts themselves",
    "pages": "and pages kept for others",
    "slabs": "and whole slabs lent",
    "held": "and free slabs of the pool",
}
_SPREAD_TEXTS = {
    "mean": "mean",
    "median": "median",
    "max": "max",
    "min": "min",
    "max_median": "max/median",
    "max_min": "max/min",
    "p99_median": "p99/median",
}
_SHARES = ("mean", "median", "max", "min")
_COUNT_TEXTS = {
    "jobs": "jobs started",
    "jobs_without_host": "jobs that no host had room for",
    "mapped": "slabs that got a donor",
    "remapped": "of these, after they had lost theirs",
    "not_placed": "searches that found no donor",
    "evictions": "slabs that donors took back",
    "moved": "of these, moved to another donor",
    "returned": "slabs given back empty",
    "failures": "hosts that failed",
    "suspended": "slabs on these",
    "recovered": "of these, back in time",
}


def tables(outcomes: Sequence[Simulated]) -> Iterator[Table]:
    """The tables of one or more seeds of one scenario."""
    first = outcomes[0]
    if first.eviction is not None:
        yield _eviction(outcomes)
    if first.choices is not None:
        yield _choices(outcomes)
    if first.compare is not None:
        yield _compare(outcomes)
    if first.sharing is not None:
        yield _sharing(outcomes)
    if first.cluster is not None:
        yield _use(outcomes)
        yield _counts(outcomes)
    if first.optimum is not None:
        yield _optimum(outcomes)


def _table(title: str, outcomes: Sequence[Simulated], *columns: str) -> Table:
    seeds = f", {len(outcomes)} seeds: mean ± standard error" if len(outcomes) > 1 else ""
    table = Table(title=f"{title}{seeds}", title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def figure(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """A mean and its standard error; - where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return show(known[0])
    return f"{show(fmean(known))} ± {show(stdev(known) / math.sqrt(len(known)))}"


def _percent(value: float) -> str:
    return f"{100.0 * value:.1f} %"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or value >= 100.0 else f"{value:.1f}"


def _fraction(value: float) -> str:
    return f"{value:.4f}"


def _use(outcomes: Sequence[Simulated]) -> Table:
    title = f"{outcomes[0].title}: memory in use at the end"
    table = _table(title, outcomes, "counted", *_SPREAD_TEXTS.values())
    for kind in KINDS:
        spreads: list[Spread] = [o.cluster.use[kind] for o in outcomes if o.cluster is not None]
        cells = [
            figure([getattr(s, name) for s in spreads], _percent if name in _SHARES else _ratio)
            for name in _SPREAD_TEXTS
        ]
        table.add_row(_KIND_TEXTS[kind], *cells)
    return table


def _counts(outcomes: Sequence[Simulated]) -> Table:
    found = [o.cluster for o in outcomes if o.cluster is not None]
    table = _table("What happened", outcomes, "what", "count")
    for name, text in _COUNT_TEXTS.items():
        values = [float(result.counts[name]) for result in found]
        if any(values) or name in ("mapped", "not_placed", "evictions"):
            table.add_row(text, figure(values, _count))
    table.add_row(
        "messages for each slab", figure([result.messages_per_slab for result in found], _ratio)
    )
    table.add_row(
        "page I/O served by donors", figure([result.served_mean for result in found], _percent)
    )
    return table


def _eviction(outcomes: Sequence[Simulated]) -> Table:
    columns = ("E' (asked beyond E)", "simulated", "without replacement", "binomial limit")
    table = _table("Batches that spare every busy slab", outcomes, *columns)
    for place, row in enumerate(outcomes[0].eviction or ()):
        seen = [o.eviction[place].seen for o in outcomes if o.eviction is not None]
        cells = (figure(seen, _fraction), _fraction(row.exact), _fraction(row.binomial))
        table.add_row(str(row.extra), *cells)
    return table


def _choices(outcomes: Sequence[Simulated]) -> Table:
    columns = ("donors", "slabs, at least", "simulated", "theory", "difference")
    table = _table("Donors with so many slabs", outcomes, *columns)
    for place, row in enumerate(outcomes[0].choices or ()):
        for level, exact in enumerate(row.exact):
            seen = [o.choices[place].seen[level] for o in outcomes if o.choices is not None]
            difference = fmean(seen) / exact - 1.0 if exact else 0.0
            cells = (figure(seen, _fraction), _fraction(exact), f"{100.0 * difference:+.1f} %")
            table.add_row(str(row.donors) if not level else "", str(level + 1), *cells)
    return table


def _compare(outcomes: Sequence[Simulated]) -> Table:
    table = _table(
        f"{outcomes[0].title}: rules compared",
        outcomes,
        *("rule", "hosts", "memory in use", "max/median", "p99/median"),
        *("slabs mapped", "without donor", "searches in vain", "evictions", "messages a slab"),
    )
    for place, row in enumerate(outcomes[0].compare or ()):
        same = [o.compare[place] for o in outcomes if o.compare is not None]
        table.add_row(
            row.rule,
            str(row.hosts),
            figure([s.used for s in same], _percent),
            figure([s.max_median for s in same], _ratio),
            figure([s.p99_median for s in same], _ratio),
            figure([float(s.mapped) for s in same], _count),
            figure([float(s.unmapped) for s in same], _count),
            figure([float(s.not_placed) for s in same], _count),
            figure([float(s.evictions) for s in same], _count),
            figure([s.messages_per_slab for s in same], _ratio),
        )
    return table


def _sharing(outcomes: Sequence[Simulated]) -> Table:
    columns = ("slabs by", "jobs", "number", "mean slowdown", "p95", "evictions")
    table = _table(f"{outcomes[0].title}: time against one with all pages on donors", outcomes)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place > 1 else "left")
    for place, row in enumerate(outcomes[0].sharing or ()):
        same = [o.sharing[place] for o in outcomes if o.sharing is not None]
        table.add_row(
            row.way,
            row.job,
            figure([float(s.jobs) for s in same], _count),
            figure([s.mean for s in same], _ratio),
            figure([s.p95 for s in same], _ratio),
            figure([float(s.evictions) for s in same], _count),
        )
    return table


def _optimum(outcomes: Sequence[Simulated]) -> Table:
    table = _table("The best placement of the same slabs", outcomes, "what", "share")
    found = [o.optimum for o in outcomes if o.optimum is not None]
    table.add_row("busiest host, own use", figure([b.own for b in found], _percent))
    table.add_row("busiest host, as simulated", figure([b.ours for b in found], _percent))
    table.add_row("busiest host, at best", figure([b.max_share for b in found], _percent))
    table.add_row("no placement is below", figure([b.bound for b in found], _percent))
    table.add_row("distance from the best", figure([b.distance for b in found], _percent))
    return table
