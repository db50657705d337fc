# SPDX-License-Identifier: Apache-2.0
"""docs/when-to-use.md: its figures are those that were measured, and it has no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from isw_bench.apps import overview_plot, page, plan, summary
from support.documents import ROOT

SUMMARY_BYTES_MAX = 100 * 1024

_MARKED = re.compile(r"<!-- measured: \w+(?: on [\w-]+)? -->\n.*?<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"\b\d+[.,]\d+|\b\d+(?= (?:s|ms|µs|MiB|GiB|times|%|rounds))|\d ×")


@pytest.fixture(scope="module")
def text() -> str:
    return page.PAGE.read_text(encoding="utf-8")


@pytest.fixture(params=sorted(path.name for path in page.PAGE.parent.glob("when-to-use*.json")))
def path(request: pytest.FixtureRequest) -> Path:
    """Of a summary."""
    return page.PAGE.with_name(request.param)


@pytest.fixture
def measured(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_pages_tables_are_made_of_the_summaries(text: str) -> None:
    assert page.filled(text) == text
    assert len(_MARKED.findall(text)) >= 4


def test_a_figure_that_was_changed_by_hand_is_noticed(text: str, measured: dict[str, Any]) -> None:
    job = next(iter(measured["jobs"].values()))
    share = next(iter(job["shares"].values()))
    share["rivals"][plan.OURS]["slowdown"]["median"] *= 1.5
    assert page.filled(text, lambda machine: measured) != text


def test_the_text_around_the_tables_has_no_figures_of_its_own(text: str) -> None:
    assert _FIGURE.findall(_MARKED.sub("", text)) == []


def test_each_table_says_how_it_was_measured(text: str) -> None:
    tables = [part for part in _MARKED.findall(text) if "\n| --- |" in part]
    assert len(tables) >= 3
    for table in tables:
        assert "Donors on loopback, cgroup v" in table
        assert "front end " in table


def test_verdicts_follow_from_the_figures_beside_them(measured: dict[str, Any]) -> None:
    for job in measured["jobs"].values():
        for share in job["shares"].values():
            kept = {name: rival["verdict"] for name, rival in share["rivals"].items()}
            assert summary.verdicts(share["rivals"], share["counts"]) == kept


def test_a_summary_is_small_names_no_directory_and_is_shown(
    path: Path, measured: dict[str, Any], text: str
) -> None:
    assert path.stat().st_size < SUMMARY_BYTES_MAX
    assert measured["jobs"]
    assert not re.search(r"/(?:tmp|work|home|root|var)\b", path.read_text())
    assert f"Infiniswap {measured['commit']}." in text


# ------------------------------------------------------------------------- the picture in README


def test_the_readmes_picture_is_drawn_of_the_summary_as_it_is() -> None:
    source = overview_plot.digest(overview_plot.SUMMARY)
    assert source.encode() in overview_plot.PICTURE.read_bytes()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"({overview_plot.PICTURE.relative_to(ROOT)})" in readme


def test_the_picture_has_every_job_and_what_others_win_or_lose() -> None:
    summary = json.loads(overview_plot.SUMMARY.read_text(encoding="utf-8"))
    rows = dict(overview_plot.bars(summary))
    assert len(rows) == len(summary["jobs"])
    etc = rows["memcached, ETC"]
    assert etc[plan.CLOUD] == "did not end in time"
    assert (
        etc[plan.DISK]
        == summary["jobs"]["memcached-etc"]["shares"]["50"]["rivals"][plan.DISK]["slowdown"][
            "median"
        ]
    )
    assert rows["polars, db-benchmark group-by"][plan.SPILL] == plan.KILLED


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra bench")
    assert overview_plot.draw(overview_plot.SUMMARY, tmp_path / "jobs.png")
    assert (tmp_path / "jobs.png").read_bytes().startswith(b"\x89PNG")
