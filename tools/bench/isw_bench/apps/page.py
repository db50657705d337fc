# SPDX-License-Identifier: Apache-2.0
"""Writes measured figures into docs/when-to-use.md, so that nobody copies numbers by hand:

    python -m isw_bench.apps.page build/bench-apps-results/results.json

keeps the summary as docs/when-to-use.json, and fills what stands between the page's markers, each
`<!-- measured: NAME -->` up to `<!-- end -->`. A test looks whether page and summary agree.
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
_MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _jobs(about: Mapping[str, Any], jobs: Mapping[str, Any]) -> str:
    return "".join(f"- **{job['title']}**: {job['about']}.\n" for job in jobs.values())


def _under(table: Callable[[Mapping[str, Any]], str]) -> Callable[..., str]:
    """The table with the caption that each one needs."""

    def part(about: Mapping[str, Any], jobs: Mapping[str, Any]) -> str:
        text = table(jobs)
        return f"{text}\n{tables.caption(about, jobs)}\n" if text else "Not measured.\n"

    return part


PARTS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    "jobs": _jobs,
    "slowdown": _under(tables.overview),
    "servers": _under(tables.servers),
    "processors": _under(tables.busy),
    "memory": _under(tables.memory),
}
"""What a marker may ask for, by name."""


def filled(page: str, summary: Mapping[str, Any]) -> str:
    """The page with the summary's figures.

    Raises:
        KeyError: a marker asks for something else.
    """

    def fill(match: re.Match[str]) -> str:
        text = PARTS[match[2]](summary, summary["jobs"])
        return f"{match[1]}\n{text}\n{match[3]}"

    return _MARKED.sub(fill, page)


def main(results: Path) -> None:
    """Takes over the results of a run."""
    found = json.loads(results.read_text(encoding="utf-8"))
    summary = {name: found[name] for name in _KEPT}
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), summary), encoding="utf-8")
    slowdown_plot.draw(summary["jobs"], PICTURE, tables.caption(summary, summary["jobs"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
