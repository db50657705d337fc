# SPDX-License-Identifier: Apache-2.0
"""The picture of README.md: `make chart` draws it from a summary of `make bench-apps`.

All jobs of the summary are in it, also those that another rival wins.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isw_bench import plotting
from isw_bench.apps import plan
from isw_bench.suite import ROOT

SUMMARY = ROOT / "docs/when-to-use-four-processors.json"
PICTURE = ROOT / "docs/jobs.png"

SHARE = "50"
_BARS = {
    plan.OURS: ("Infiniswap, its copy on the fast disk", "#1f5fbf"),
    plan.DISK: ("swap file on a fast local disk", "#b3261e"),
    plan.OURS_CLOUD: ("Infiniswap, its copy on a cloud volume", "#9cc3f2"),
    plan.CLOUD: ("swap on a cloud volume", "#f0aaa4"),
    plan.SPILL: ("the application's own spilling", "#8a6d3b"),
}
"""What a reader chooses between; the whole table has the others."""

_SIZE_INCHES = (8.0, 8.2)
_DPI = 110
_APART = 0.165


_LOST = {plan.TIMEOUT: "did not end in time", plan.KILLED: plan.KILLED}


def bars(summary: Mapping[str, Any]) -> list[tuple[str, dict[str, float | str]]]:
    """Jobs from the top: by rival the times as long, or how it was lost."""
    found = []
    for job in summary["jobs"].values():
        rivals = job["shares"][SHARE]["rivals"]
        row: dict[str, float | str] = {}
        for name in (name for name in _BARS if name in rivals):
            status = rivals[name]["status"]
            row[name] = rivals[name]["slowdown"]["median"] if status == plan.OK else _LOST[status]
        found.append((job["title"], row))
    return found


def digest(path: Path) -> str:
    """Of a summary; the picture carries it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(source: Path, path: Path) -> bool:
    """Writes the PNG of a summary; False when there is no matplotlib."""
    pyplot = plotting.pyplot()
    if pyplot is None:
        return False
    rows = bars(json.loads(source.read_text(encoding="utf-8")))
    longest = max(v for _, row in rows for v in row.values() if not isinstance(v, str))
    figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
    for place, (_, row) in enumerate(rows):
        for i, (name, value) in enumerate(row.items()):
            at = place + _APART * (i - (len(row) - 1) / 2)
            title, colour = _BARS[name]
            known = axes.get_legend_handles_labels()[1]
            lost = isinstance(value, str)
            length = longest if isinstance(value, str) else value
            axes.barh(at, length - 1, _APART * 0.9, left=1, color=colour,
                      hatch="///" if lost else None, edgecolor="white", linewidth=0,
                      label=None if title in known else title)  # fmt: skip
            text = value if isinstance(value, str) else f"{value:.1f}"
            axes.text(max(length, 1) * 1.02, at, text, fontsize=7, va="center")
    axes.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.7, longest * 2.6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([1, 2, 3, 5, 10, 20, 30], ["1", "2", "3", "5", "10", "20", "30"])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("times as long as with all the memory it wants (less is better)", fontsize=9)
    axes.set_title("Jobs with half of the memory they want", fontsize=12, loc="left")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=_DPI, metadata={"Software": None, "Source": digest(source)})
    pyplot.close(figure)
    return True


def main() -> int:
    """Draws docs/jobs.png."""
    if not draw(SUMMARY, PICTURE):
        sys.exit("infiniswap: matplotlib is missing. Run `pip install -e .[bench]`.")
    print(f"chart: wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
