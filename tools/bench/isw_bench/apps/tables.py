# SPDX-License-Identifier: Apache-2.0
"""The summary as tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infiniswap.units import format_size_short
from isw_bench.apps import plan
from isw_bench.apps.summary import LATENCIES, as_spread, rounds_of
from isw_bench.results import format_spread, format_value

Summary = Mapping[str, Any]

_TEXTS = ("job", "server", "memory", "rival")
"""Columns of words."""
_BUSY = ("job", "memory", "rival", "job, s", "device, s", "donors, s", "kernel, s", "all, s")
_MEMORY = ("job", "memory", "rival", "in the limit", "pool", "run and device", "paged in")
_SERVERS = ("server", "memory", "rival", "op/s", "p50, µs", "p99, µs", "p99.9, µs")


def overview(summary: Summary) -> str:
    """Slowdowns: a line for each job and share, a column for each rival that was measured."""
    lines = []
    measured = {name for _, _, rivals in _shares(summary) for name in rivals}
    columns = [name for name in plan.ORDER if name in measured]
    for job, share, rivals in _shares(summary):
        limit_bytes = next(iter(rivals.values()))["limit_bytes"]
        cells = [_slowdown(rivals[name]) if name in rivals else "" for name in columns]
        lines.append((job["title"], _memory(share, limit_bytes), *cells))
    return _table(("job", "memory", *columns), lines)


def busy(summary: Summary) -> str:
    """Processor seconds."""
    lines = []
    for job, share, name, rival in _every(summary):
        seconds = rival["busy_s"]
        every = [seconds[part] for part in ("job", "device", "donors", "kernel")]
        total = sum(value for value in every if value is not None)
        cells = ["" if value is None else format_value(value) for value in every]
        lines.append(
            (
                job["title"],
                _memory(share, rival.get("limit_bytes", job["peak_bytes"])),
                name,
                *cells,
                format_value(total),
            )
        )
    return _table(_BUSY, lines)


def memory(summary: Summary) -> str:
    """Peaks in and outside the limit."""
    lines = []
    for job, share, name, rival in _every(summary):
        if share == plan.WHOLE:
            continue
        peaks = [rival["memory"][part] for part in ("inside_bytes", "pool_bytes", "device_bytes")]
        sizes = [format_size_short(peak) if peak else "" for peak in peaks]
        paged = format_size_short(rival["paged_in_bytes"])
        lines.append(
            (
                job["title"],
                _memory(share, rival.get("limit_bytes", job["peak_bytes"])),
                name,
                *sizes,
                paged,
            )
        )
    return _table(_MEMORY, lines)


def servers(summary: Summary) -> str:
    """Throughput and percentiles; "" where no server was measured."""
    lines = [
        (
            job["title"],
            _memory(share, rival.get("limit_bytes", job["peak_bytes"])),
            name,
            *(
                format_value(rival[key]) if key in rival else ""
                for key in ("ops_per_s", *LATENCIES)
            ),
        )
        for job, share, name, rival in _every(summary)
        if "ops_per_s" in rival
    ]
    return _table(_SERVERS, lines) if lines else ""


def caption(about: Mapping[str, Any], summary: Summary) -> str:
    """What stands below each table."""
    least, most = rounds_of(summary.values())
    rounds = str(most) if least == most else f"{least} to {most}"
    machine = about["machine"]
    return (
        f"Donors on loopback, cgroup v{about['cgroup_version']}, front end {about['front_end']}; "
        f"{rounds} round{'s' * (most != 1)}, median [quartiles]. {machine['processor']}, "
        f"{machine['processors']} processors, Linux {machine['kernel']}; Infiniswap "
        f"{about['commit']}."
    )


def everything(about: Mapping[str, Any], summary: Summary) -> str:
    """results.md."""
    below = caption(about, summary)
    parts = [f"- {job['title']}: {job['about']}." for job in summary.values()]
    text = "\n".join(parts) + "\n"
    for title, table in (
        ("Slowdown against no limit", overview(summary)),
        ("Servers", servers(summary)),
        ("Processor time", busy(summary)),
        ("Memory", memory(summary)),
    ):
        if table:
            text += f"\n## {title}\n\n{table}\n{below}\n"
    return text


def _slowdown(rival: Mapping[str, Any]) -> str:
    if rival["slowdown"] is None or rival["status"] != plan.OK:
        words = str(rival["verdict"] or rival["status"])
        least = rival["slowdown_min"]
        return f"> {format_value(least)}" if words == plan.TIMEOUT and least else words
    text = format_spread(as_spread(rival["slowdown"]))
    return f"{text} {rival['verdict']}".strip()


def _memory(share: int, limit_bytes: int) -> str:
    size = format_size_short(limit_bytes)
    return f"{share} %, {size}" if share != plan.WHOLE else f"all, {size}"


def _shares(summary: Summary) -> Iterable[tuple[Any, int, Mapping[str, Any]]]:
    for job in summary.values():
        for share, found in job["shares"].items():
            yield job, int(share), found["rivals"]


def _every(summary: Summary) -> Iterable[tuple[Any, int, str, Mapping[str, Any]]]:
    """What has run to its end."""
    for job in summary.values():
        yield job, plan.WHOLE, plan.UNLIMITED, job["no_limit"]
        for share, found in job["shares"].items():
            for name, rival in found["rivals"].items():
                if rival["status"] == plan.OK:
                    yield job, int(share), name, rival


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    marks = ["---" if heading in _TEXTS else "---:" for heading in headings]
    rows = [headings, marks, *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
