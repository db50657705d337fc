# SPDX-License-Identifier: Apache-2.0
"""Writes measured figures into docs/when-to-use.md, so that nobody copies numbers by hand:

    python -m isw_bench.apps.page build/bench-apps-results/results.json

keeps the summary as docs/when-to-use.json, and fills what stands between the page's markers, each
`<!-- measured: NAME -->` up to `<!-- end -->`. `NAME on MACHINE` takes the figures from another
summary, docs/when-to-use-MACHINE.json. A test looks whether page and summaries agree.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isw_bench.apps import slowdown_plot, tables
from isw_bench.suite import ROOT

PAGE = ROOT / "docs" / "when-to-use.md"
SUMMARY = PAGE.with_suffix(".json")
PICTURE = PAGE.with_suffix(".png")

_KEPT = (
    *("schema", "ended", "commit", "size", "cgroup_version", "front_end"),
    *("machine", "libraries", "jobs"),
)
"""Of a run's results: nothing that names a directory."""
_MARKED = re.compile(r"(<!-- measured: (\w+)(?: on ([\w-]+))? -->\n).*?(<!-- end -->)", re.DOTALL)

Summary = Mapping[str, Any]


def summary_path(machine: str = "") -> Path:
    """Of the machine that is measured again and again, or of another one."""
    return PAGE.with_name(f"{PAGE.stem}-{machine}.json") if machine else SUMMARY


def summary_of(machine: str = "") -> Summary:
    """What was measured there."""
    found: Summary = json.loads(summary_path(machine).read_text(encoding="utf-8"))
    return found


def _jobs(about: Summary, jobs: Summary) -> str:
    return "".join(f"- **{job['title']}**: {job['about']}.\n" for job in jobs.values())


def _under(table: Callable[[Summary], str]) -> Callable[..., str]:
    """The table with the caption that each one needs."""

    def part(about: Summary, jobs: Summary) -> str:
        text = table(jobs)
        return f"{text}\n{tables.caption(about, jobs)}\n" if text else "Not measured.\n"

    return part


PARTS: Mapping[str, Callable[[Summary, Summary], str]] = {
    "jobs": _jobs,
    "slowdown": _under(tables.overview),
    "servers": _under(tables.servers),
    "processors": _under(tables.busy),
    "memory": _under(tables.memory),
}
"""What a marker may ask for, by name."""


def filled(page: str, summaries: Callable[[str], Summary] = summary_of) -> str:
    """The page with figures.

    Args:
        page: its text.
        summaries: gives the one of a machine.

    Raises:
        KeyError: a marker asks for something else.
    """

    def fill(match: re.Match[str]) -> str:
        summary = summaries(match[3] or "")
        text = PARTS[match[2]](summary, summary["jobs"])
        return f"{match[1]}\n{text}\n{match[4]}"

    return _MARKED.sub(fill, page)


def main(results: Path) -> None:
    """Takes over the results of a run."""
    found = json.loads(results.read_text(encoding="utf-8"))
    summary = {name: found[name] for name in _KEPT}
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    slowdown_plot.draw(summary["jobs"], PICTURE, tables.caption(summary, summary["jobs"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
