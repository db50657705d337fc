# SPDX-License-Identifier: Apache-2.0
"""The plot of a simulation, a PNG. Of several seeds the first is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infiniswap.errors import UnavailableError, from_oserror
from infiniswap.simulation.load import install
from infiniswap.simulation.measures import Result
from infiniswap.simulation.runner import Simulated

_BEFORE, _AFTER, _THIRD = "#8c8c8c", "#1f6fb4", "#d1652a"
_DPI = 100
_RULE_STYLES = {"product": "o-", "random": "s--", "four": "^-.", "global": "d:"}
_RULE_TEXTS = {
    "product": "two choices",
    "random": "random",
    "four": "four choices",
    "global": "global view",
}


def draw(outcome: Simulated, path: Path) -> None:
    """Writes the file.

    Raises:
        UnavailableError: matplotlib is not installed.
        InfiniswapError: the file cannot be written.
    """
    figure = _figure(outcome)
    try:
        figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise from_oserror("cannot write the plot", error, where=str(path)) from error


def _figure(outcome: Simulated) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            f"a plot needs matplotlib: {error}", where="--plot", mend=install()
        ) from error
    if outcome.cluster is not None:
        figure = Figure(figsize=(11, 7), layout="constrained")
        _cluster(figure.subplots(2, 2), outcome.cluster)
    elif outcome.compare is not None:
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        _compare(figure.subplots(1, 3), outcome)
    elif outcome.sharing is not None:
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        _sharing(figure.subplots(1, 2), outcome)
    elif outcome.eviction is not None:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        _eviction(figure.subplots(), outcome)
    else:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        _choices(figure.subplots(), outcome)
    figure.suptitle(outcome.title)
    return figure


def _cluster(axes: Any, result: Result) -> None:
    (use, line), (evictions, messages) = axes
    order = sorted(range(len(result.hosts["own"])), key=lambda n: result.hosts["own"][n])
    for kind, colour, text in (
        ("held", _THIRD, "whole slabs held"),
        ("pages", _AFTER, "pages used"),
        ("own", _BEFORE, "before: own use"),
    ):
        values = [100.0 * result.hosts[kind][host] for host in order]
        use.fill_between(range(len(order)), values, step="mid", color=colour, label=text)
    use.set(xlabel="host, by its own use", ylabel="memory in use, %", ylim=(0, 100))
    use.legend(loc="upper left")
    times, unit = _times([row.time_s for row in result.rows])
    for name, style in (("p99_median", "--"), ("max_median", "-")):
        text = name.replace("_", "/")
        for kind, colour in (("own", _BEFORE), ("held", _THIRD)):
            values = [getattr(getattr(row, kind), name) for row in result.rows]
            label = f"{text}, {'own use' if kind == 'own' else 'whole slabs held'}"
            line.plot(times, values, style, color=colour, label=label)
    line.set(xlabel=f"time, {unit}", ylabel="imbalance", ylim=(1, None))
    line.legend()
    evictions.plot(times, [row.evictions for row in result.rows], color=_THIRD, label="evictions")
    evictions.plot(times, [row.unmapped for row in result.rows], color=_BEFORE, label="no donor")
    evictions.plot(times, [row.mapped for row in result.rows], color=_AFTER, label="lent")
    evictions.set(xlabel=f"time, {unit}", ylabel="slabs", ylim=(0, None))
    evictions.legend()
    messages.plot(times, [row.messages for row in result.rows], color=_AFTER)
    per_slab = result.messages_per_slab
    title = "" if per_slab is None else f"{per_slab:.1f} for each slab that got a donor"
    messages.set(xlabel=f"time, {unit}", ylabel="control messages", ylim=(0, None), title=title)


def _times(times_s: list[float]) -> tuple[list[float], str]:
    longest = times_s[-1]
    unit_s, unit = (3600.0, "h") if longest > 7200 else (60.0, "min") if longest > 300 else (1, "s")
    return [time_s / unit_s for time_s in times_s], unit


def _eviction(axes: Any, outcome: Simulated) -> None:
    rows = outcome.eviction or []
    extra = [row.extra for row in rows]
    axes.plot(extra, [row.exact for row in rows], color=_AFTER, label="without replacement")
    axes.plot(extra, [row.binomial for row in rows], "--", color=_BEFORE, label="binomial limit")
    axes.plot(extra, [row.seen for row in rows], "o", color=_THIRD, label="simulated")
    axes.set(xlabel="E': slabs asked beyond E", ylabel="chance that no busy slab goes", ylim=(0, 1))
    axes.legend()


def _choices(axes: Any, outcome: Simulated) -> None:
    row = (outcome.choices or [])[-1]
    places = range(1, len(row.exact) + 1)
    axes.bar([p - 0.2 for p in places], row.seen, 0.4, color=_AFTER, label=f"{row.donors} donors")
    axes.bar([p + 0.2 for p in places], row.exact, 0.4, color=_BEFORE, label="theory")
    axes.set(xlabel="slabs, at least", ylabel="fraction of donors", yscale="log", xticks=places)
    axes.legend()


def _sharing(axes: Any, outcome: Simulated) -> None:
    rows = outcome.sharing or []
    ways = list(dict.fromkeys(row.way for row in rows))
    jobs = list(dict.fromkeys(row.job for row in rows))
    width = 0.8 / len(ways)
    for place, way in enumerate(ways):
        mine = {row.job: row for row in rows if row.way == way}
        places = [n + (place - (len(ways) - 1) / 2) * width for n in range(len(jobs))]
        colour = (_BEFORE, _AFTER, _THIRD)[place]
        for axis, name in zip(axes, ("mean", "p95"), strict=True):
            values = [getattr(mine[job], name) for job in jobs]
            axis.bar(places, values, width, color=colour, label=f"slabs by {way}")
    for axis, text in zip(axes, ("mean", "p95"), strict=True):
        axis.set(ylabel=f"slowdown, {text}", ylim=(1.0, None), xticks=range(len(jobs)))
        axis.set_xticklabels(jobs)
        axis.axhline(1.0, color="black", linewidth=0.8)
    axes[0].legend()


def _compare(axes: Any, outcome: Simulated) -> None:
    rows = outcome.compare or []
    for rule in dict.fromkeys(row.rule for row in rows):
        mine = [row for row in rows if row.rule == rule]
        hosts, style = [row.hosts for row in mine], _RULE_STYLES[rule]
        columns = (
            [100.0 * row.evictions / max(1, row.mapped) for row in mine],
            [row.max_median for row in mine],
            [row.messages_per_slab for row in mine],
        )
        for axis, values in zip(axes, columns, strict=True):
            axis.plot(hosts, values, style, label=_RULE_TEXTS[rule])
    texts = ("evictions, % of the slabs mapped", "max/median", "control messages a slab")
    for axis, text in zip(axes, texts, strict=True):
        axis.set(xlabel="hosts", ylabel=text, xscale="log")
        axis.set_ylim(bottom=1.0 if text == "max/median" else 0.0)
    axes[0].legend()
