# SPDX-License-Identifier: Apache-2.0
"""From measured cells to slowdowns with quartiles and a verdict for each rival. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isw_bench.apps import plan
from isw_bench.apps.plan import KILLED, NO_ROOM, OK, TIMEOUT, WRONG, Cell
from isw_bench.stats import Spread, quantile, spread

Result = Mapping[str, Any]
Results = Mapping[Cell, Result]

TOO_SMALL, FITS, NO_FIT = "too small", "fits", "does not fit"
WIN, TIE = "win", "tie"

PAGED_SHARE_MIN = 0.5
"""Of the job's peak that plain swap must have paged in, or the limit was no test."""
_POOL_SERVED_MIN = 0.95
"""Of the page-ins: zswap whose pool served that many held the job compressed."""
_MEETINGS = (
    (plan.OURS, plan.OURS_ZSWAP, plan.DISK, plan.ZSWAP, plan.SPILL),
    (plan.OURS_CLOUD, plan.CLOUD),
)
"""Rivals that have the same disk behind them, and so may win against each other."""
_COMPRESSING = (plan.ZRAM, plan.ZSWAP, plan.OURS_ZSWAP)
LATENCIES = ("p50_us", "p99_us", "p999_us")


def work_s(result: Result) -> float:
    """What slowdowns are made of: a job's time, a server's time for one operation."""
    if "ops_per_s" in result:
        return 1.0 / float(result["ops_per_s"])
    return float(result["elapsed_s"])


def summarize(results: Results, jobs: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Everything that tables and the plot show, small enough for the documentation.

    Args:
        results: finished cells.
        jobs: key, title and description of each, in order.
    """
    found = {}
    for key, title, about in jobs:
        base = {
            cell.round: result
            for cell, result in results.items()
            if cell.job == key and cell.rival == plan.UNLIMITED and result["status"] == OK
        }
        if base:
            found[key] = {"title": title, "about": about, **_job(key, base, results)}
    return found


def _job(key: str, base: Mapping[int, Result], results: Results) -> dict[str, Any]:
    peak_bytes = base[min(base)]["memory"]["anon_bytes"]
    shares = sorted({cell.share for cell in results if cell.job == key} - {plan.WHOLE})
    return {
        "peak_bytes": peak_bytes,
        "no_limit": _own_figures(list(base.values())),
        "shares": {
            str(share): _share(key, share, base, results, peak_bytes) for share in reversed(shares)
        },
    }


def _share(
    key: str, share: int, base: Mapping[int, Result], results: Results, peak_bytes: int
) -> dict[str, Any]:
    rivals = {}
    for name in plan.ORDER:
        cells = {
            cell.round: result
            for cell, result in sorted(results.items(), key=lambda item: item[0].round)
            if (cell.job, cell.share, cell.rival) == (key, share, name) and cell.round in base
        }
        if cells:
            rivals[name] = _rival(cells, base)
    paged = [rivals[name]["paged_in_bytes"] for name in (plan.DISK, plan.CLOUD) if name in rivals]
    counts = paged[0] > PAGED_SHARE_MIN * peak_bytes if paged else None
    for name, verdict in verdicts(rivals, counts).items():
        rivals[name]["verdict"] = verdict
    return {"counts": counts, "rivals": rivals}


def _rival(cells: Mapping[int, Result], base: Mapping[int, Result]) -> dict[str, Any]:
    good = {number: result for number, result in cells.items() if result["status"] == OK}
    bad = [result["status"] for result in cells.values() if result["status"] != OK]
    ended = [
        work_s(result) / work_s(base[number])
        for number, result in cells.items()
        if result["status"] == TIMEOUT and "ops_per_s" not in base[number]
    ]
    ratios = [work_s(result) / work_s(base[number]) for number, result in good.items()]
    served = [
        result["paged"]["pool_in_bytes"] / max(1, result["paged"]["in_bytes"])
        for result in good.values()
    ]
    return {
        "status": WRONG if WRONG in bad else bad[0] if bad else OK,
        "slowdown": _spread(ratios),
        "slowdown_min": round(min(ended), 1) if ended else None,
        "pool_served": round(median(served), 4) if served else None,
        "limit_bytes": next(iter(cells.values()))["limit_bytes"],
        "paged_in_bytes": int(median([r["paged"]["in_bytes"] for r in cells.values()])),
        "paged_out_bytes": int(median([r["paged"]["out_bytes"] for r in cells.values()])),
        **_own_figures(list((good or cells).values())),
    }


def _own_figures(results: Sequence[Result]) -> dict[str, Any]:
    """Medians of what does not need a base."""
    found: dict[str, Any] = {
        "rounds": len(results),
        "elapsed_s": _median_at(results, "elapsed_s"),
        "busy_s": {
            part: _median_at(results, "busy_s", part)
            for part in ("job", "device", "donors", "kernel")
        },
        "memory": {
            part: int(_median_at(results, "memory", part) or 0)
            for part in ("inside_bytes", "pool_bytes", "device_bytes")
        },
    }
    for name in ("ops_per_s", *LATENCIES):
        if (value := _median_at(results, name)) is not None:
            found[name] = value
    return found


def _median_at(results: Sequence[Result], *keys: str) -> float | None:
    """Of what the results have there: a number, or numbers to add up."""
    values = []
    for result in results:
        value: Any = result
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            value = sum(value.values())
        if value is not None:
            values.append(float(value))
    return round(median(values), 4) if values else None


def median(values: Sequence[float]) -> float:
    """Of at least one value."""
    return quantile(values, 0.5)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = spread(values)
    return {
        "median": round(found.median, 4),
        "q1": round(found.q1, 4),
        "q3": round(found.q3, 4),
        "count": found.count,
    }


def as_spread(data: Mapping[str, float]) -> Spread:
    """What `_spread` has made."""
    return Spread(data["median"], data["q1"], data["q3"], int(data["count"]))


# --------------------------------------------------------------------------- verdicts


def verdicts(rivals: Mapping[str, Result], counts: bool | None) -> dict[str, str]:
    """A word for each rival, "" where there is nothing to say.

    Args:
        rivals: of one job and share.
        counts: whether plain swap paged enough; None: it was not measured.
    """
    found = {name: _verdict(name, rival) for name, rival in rivals.items()}
    if counts is not True:
        word = TOO_SMALL if counts is False else ""
        return {name: verdict or word for name, verdict in found.items()}
    for meeting in _MEETINGS:
        present = [name for name in meeting if found.get(name, FITS) != FITS]
        if len(present) > 1:
            found |= _wins({name: rivals[name] for name in present if found[name] == ""})
    return found


def _verdict(name: str, rival: Result) -> str:
    status = str(rival["status"])
    if name in _COMPRESSING:
        if status in (NO_ROOM, KILLED, TIMEOUT):
            return NO_FIT
        if status == OK and (name == plan.ZRAM or rival["pool_served"] >= _POOL_SERVED_MIN):
            return FITS
    return "" if status == OK else status


def _wins(rivals: Mapping[str, Result]) -> dict[str, str]:
    """The fastest wins; those whose quartiles overlap with its tie with it. Rivals that did not
    get to the end are not among them."""
    if not rivals:
        return {}
    spreads = {name: as_spread(rival["slowdown"]) for name, rival in rivals.items()}
    best = min(spreads, key=lambda name: spreads[name].median)
    ties = [name for name in spreads if name != best and spreads[name].q1 <= spreads[best].q3]
    return dict.fromkeys([best, *ties], TIE) if ties else {best: WIN}


def bad_answers(results: Results) -> list[Cell]:
    """Cells whose job gave another answer than without a limit."""
    return [cell for cell, result in results.items() if result["status"] == WRONG]


def rounds_of(summary: Iterable[Result]) -> tuple[int, int]:
    """The least and the greatest number of rounds behind any slowdown."""
    counts = [
        rival["slowdown"]["count"]
        for job in summary
        for share in job["shares"].values()
        for rival in share["rivals"].values()
        if rival["slowdown"]
    ]
    return (min(counts), max(counts)) if counts else (0, 0)
