# SPDX-License-Identifier: Apache-2.0
"""Judges a score, and draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from isw_bench.stats import pair_ratios

MEDIAN_MAX, WORST_MAX, SLOWDOWN_MAX = 0.15, 0.35, 0.10
"""What a score should keep: errors of the time, and of the recommended limit's slowdown."""

_MIB = 2**20


def predicted(plan: Mapping[str, Any], limit_bytes: int, key: str) -> float:
    """A value of the curve at a limit, on a line between its points."""
    points = sorted((point["limit_bytes"], point[key]) for point in plan["curve"])
    below = max((point for point in points if point[0] <= limit_bytes), default=points[0])
    above = min((point for point in points if point[0] >= limit_bytes), default=points[-1])
    wide = above[0] - below[0]
    share = (limit_bytes - below[0]) / wide if wide else 0.0
    return float(below[1] + (above[1] - below[1]) * share)


def errors(jobs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of all predicted times, as shares of the real ones."""
    return [_error(job["plan"], run) for job in jobs for run in job["runs"]]


def _error(plan: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """What is said to be the least is only wrong where it is more."""
    error: float = predicted(plan, run["local_bytes"], "elapsed_s") / run["elapsed_s"] - 1
    return max(0.0, error) if _is_least(plan, run["local_bytes"]) else abs(error)


def _is_least(plan: Mapping[str, Any], limit_bytes: int) -> bool:
    """Whether the time at a limit is the least that it may be."""
    closest = min(plan["curve"], key=lambda point: abs(point["limit_bytes"] - limit_bytes))
    return bool(closest["source"] == "at least")


def slowdown_errors(jobs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of the recommended limits."""
    return [abs(_slowdown(job) - job["plan"]["slowdown"]) for job in jobs]


def _slowdown(job: Mapping[str, Any]) -> float:
    return median(pair_ratios(_times(job, "recommended"), _times(job, "whole")))


def _times(job: Mapping[str, Any], key: str) -> list[float]:
    return [run["elapsed_s"] for run in job[key]]


def verdict(jobs: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """In a sentence, and whether all is kept."""
    found, slow = errors(jobs), slowdown_errors(jobs)
    middle, worst, most = median(found), max(found), max(slow)
    text = (
        f"time: median error {middle:.0%} (at most {MEDIAN_MAX:.0%}), worst {worst:.0%} (at most "
        f"{WORST_MAX:.0%}); recommended limit: slowdown off by at most {most:.2f} (at most "
        f"{SLOWDOWN_MAX:.2f})"
    )
    return text, middle <= MEDIAN_MAX and worst <= WORST_MAX and most <= SLOWDOWN_MAX


def table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    rows = [
        "| job | limit | predicted | real | error | page-ins predicted | real |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for job in jobs:
        peak = job["plan"]["peak_bytes"]
        for run in job["runs"]:
            limit, real_s = run["local_bytes"], run["elapsed_s"]
            guess_s = predicted(job["plan"], limit, "elapsed_s")
            guess_pages = predicted(job["plan"], limit, "page_ins")
            mark = "≥ " if _is_least(job["plan"], limit) else ""
            rows.append(
                f"| {job['title']} | {limit / _MIB:.0f} MiB ({limit / peak:.0%}) "
                f"| {mark}{guess_s:.1f} s | {real_s:.1f} s | {guess_s / real_s - 1:+.0%} "
                f"| {mark}{guess_pages:.0f} | {run['page_in_bytes'] // 4096} |"
            )
    rows += ["", "| job | recommended | wanted slowdown | real |", "| --- | ---: | ---: | ---: |"]
    for job in jobs:
        local = job["plan"]["recommended"]["limit_bytes"] / _MIB
        wanted = job["plan"]["slowdown"]
        rows.append(f"| {job['title']} | {local:.0f} MiB | {wanted:g} | {_slowdown(job):.2f} |")
    return "\n".join(rows)


def draw(jobs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The predicted curves, and the real runs as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, job in zip(figure.subplots(1, len(jobs), squeeze=False)[0], jobs, strict=True):
        curve = job["plan"]["curve"]
        peak = job["plan"]["peak_bytes"]
        shares = [100 * point["limit_bytes"] / peak for point in curve]
        axes.plot(shares, [point["elapsed_s"] for point in curve], color="#1f6fb4")
        real = [(100 * run["local_bytes"] / peak, run["elapsed_s"]) for run in job["runs"]]
        real.append((100.0, median(_times(job, "whole"))))
        axes.plot(*zip(*real, strict=True), "o", color="#d1652a")
        axes.set_title(job["title"], fontsize=9)
        axes.set_xlabel("limit, % of peak")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time, s")
    figure.suptitle("predicted (line) and measured in separate runs (points)")
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})
