# SPDX-License-Identifier: Apache-2.0
"""What a plan tells: a table with a curve, the recommended limit, remarks, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.table import Table

from infiniswap.control.text import printable
from infiniswap.errors import UnavailableError, from_oserror
from infiniswap.extras import how_to_install
from infiniswap.planning.prediction import Point, Source
from infiniswap.planning.trials import Trial
from infiniswap.units import format_size_short

_BAR: Final = 24
"""Columns of the longest time."""
_DPI: Final = 100
_MARKS: Final[dict[Source, str]] = {"measured": "", "estimated": "~ ", "at least": "≥ "}
_MEANING: Final[dict[Source, str]] = {
    "measured": "",
    "estimated": "estimated from the pages that came back with half of the memory",
    "at least": "at least that, as the limit was taken away before the job ended",
}
_AHEAD: Final = 0.05
"""Of its time: what a first run takes longer is mentioned."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The result; also the fields of --json.

    Attributes:
        command: as it is typed.
        exit_code: of the run without a limit.
        elapsed_s: its time once its files and its memory are at hand, as in a second run.
        first_elapsed_s: the time that it took in the first one.
        peak_bytes: the most memory that the job used, file cache left out.
        probe_limit_bytes: of the run with half of the memory; None: there was none.
        probe_elapsed_s: its time.
        probe_is_cut: its limit was taken away before the end.
        probe_page_ins: pages that came in.
        probe_share: of the job's work that it did with a limit.
        page_us: what a page costs.
        from_history: share of `page_us` that comes from earlier plans and defaults.
        slowdown: that was asked for.
        recommended: the smallest limit for that; None: no prediction.
        type: the command that runs the job so.
        curve: without a limit, then from the highest limit down; empty: no prediction.
        tried: runs with other limits, in order.
        notes: what limits the prediction.
    """

    command: str
    exit_code: int
    elapsed_s: float
    first_elapsed_s: float
    peak_bytes: int
    probe_limit_bytes: int | None
    probe_elapsed_s: float
    probe_is_cut: bool
    probe_page_ins: int
    probe_share: float
    page_us: float
    from_history: float
    slowdown: float
    recommended: Point | None
    type: str
    curve: Sequence[Point]
    tried: Sequence[Trial]
    notes: Sequence[str]


def table(plan: Planned) -> Table:
    """A line for each limit; those that were not measured are marked."""
    found = Table(title=f"{printable(plan.command)}: time with less memory", title_justify="left")
    for name in ("limit", "of peak", "time", "slowdown", "page-ins", "remote memory"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("time")
    longest_s = max(point.elapsed_s for point in plan.curve)
    for place, point in enumerate(plan.curve):
        mark = _MARKS[point.source]
        found.add_row(
            format_size_short(point.limit_bytes) if place else "none",
            f"{point.limit_bytes / plan.peak_bytes:.0%}",
            f"{mark}{point.elapsed_s:.1f} s",
            f"{mark}{point.slowdown:.2f}",
            mark + f"{point.page_ins:,}".replace(",", " "),
            format_size_short(point.remote_bytes),
            "█" * max(1, round(_BAR * point.elapsed_s / longest_s)),
        )
    return found


def lines(plan: Planned) -> list[str]:
    """What stands below the table."""
    sources = {point.source for point in plan.curve}
    said = [f"{_MARKS[each]}{text}" for each, text in _MEANING.items() if text and each in sources]
    said += [
        f"{plan.elapsed_s:.1f} s without a limit, and {format_size_short(plan.peak_bytes)} of "
        "memory at the most"
    ]
    if plan.first_elapsed_s - plan.elapsed_s > _AHEAD * plan.elapsed_s:
        said.append(
            f"the first run took {plan.first_elapsed_s:.1f} s, as its files were not cached by "
            "then, for example; the times are those of a job that runs again"
        )
    if plan.probe_limit_bytes is not None:
        half = Trial(
            plan.probe_limit_bytes, plan.probe_elapsed_s, plan.probe_page_ins, plan.probe_is_cut
        )
        said.append(f"half of its memory, {_tried(plan, half)}, {plan.probe_page_ins} page-ins")
    said += [f"tried: {_tried(plan, trial)}" for trial in plan.tried]
    said += plan.notes
    if plan.recommended is not None:
        limit = format_size_short(plan.recommended.limit_bytes)
        remote = format_size_short(plan.recommended.remote_bytes)
        need = f"a limit of {limit}, and {remote} of remote memory"
        if not plan.recommended.remote_bytes:
            need = f"all of its memory, {limit}"
        said.append(f"a slowdown of {plan.slowdown:g} needs {need}. Type: {plan.type}")
    return said


def _tried(plan: Planned, trial: Trial) -> str:
    limit, slowdown = format_size_short(trial.limit_bytes), trial.elapsed_s / plan.elapsed_s
    if trial.is_lifted:
        return (
            f"{limit}: more than {trial.elapsed_s:.1f} s, as the limit was taken away before the "
            f"end, a slowdown above {slowdown:.2f}"
        )
    return f"{limit}: {trial.elapsed_s:.1f} s, a slowdown of {slowdown:.2f}"


def install() -> str:
    """The remedy where matplotlib is missing."""
    return how_to_install(["matplotlib"], "infiniswap plan --plot FILE -- COMMAND", as_root=True)


def draw(plan: Planned, path: Path) -> None:
    """Writes a PNG file: time and page-ins against the limit.

    Raises:
        UnavailableError: matplotlib is not installed.
        InfiniswapError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            f"a plot needs matplotlib: {error}", where="--plot", mend=install()
        ) from error
    mib = [point.limit_bytes / 2**20 for point in plan.curve]
    figure = Figure(figsize=(10, 4), layout="constrained")
    times, pages = figure.subplots(1, 2)
    times.plot(mib, [point.elapsed_s for point in plan.curve], color="#1f6fb4")
    kinds: tuple[tuple[Source, str], ...] = (("measured", "o"), ("at least", "^"))
    for source, marker in kinds:
        ran = [point for point in plan.curve if point.source == source]
        sizes = [point.limit_bytes / 2**20 for point in ran]
        times.plot(sizes, [point.elapsed_s for point in ran], marker, color="#444", label=source)
    times.set_ylabel("time, s")
    if plan.recommended is not None:
        at = plan.recommended.limit_bytes / 2**20
        times.axvline(at, color="#d1652a", linestyle="--", label=f"slowdown {plan.slowdown:g}")
    times.legend()
    pages.plot(mib, [point.page_ins / 1000 for point in plan.curve], color="#1f6fb4")
    pages.set_ylabel("page-ins, thousands")
    for axes in (times, pages):
        axes.set_xlabel("limit, MiB")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(plan.command)
    try:
        figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise from_oserror("cannot write the plot", error, where=str(path)) from error
