# SPDX-License-Identifier: Apache-2.0
"""The judge of `make bench-plan`, on made-up runs."""

from __future__ import annotations

from typing import Any

import pytest
from isw_bench.planning import tables

MIB = 2**20


def job(
    real_s: tuple[float, ...] = (12.0, 20.0),
    whole_s: tuple[float, ...] = (10.0, 20.0, 10.0),
    recommended_s: tuple[float, ...] = (11.0, 22.0, 90.0),
    source: str = "measured",
) -> dict[str, Any]:
    """A job of 100 MiB that is predicted 10 s, and 20 s with half of it."""
    curve = [
        {"limit_bytes": limit * MIB, "elapsed_s": seconds, "page_ins": pages, "source": source}
        for limit, seconds, pages in ((100, 10.0, 0), (75, 12.0, 100), (50, 20.0, 300))
    ]
    return {
        "title": "a job",
        "plan": {
            "peak_bytes": 100 * MIB,
            "slowdown": 1.1,
            "recommended": {"limit_bytes": 90 * MIB},
            "curve": curve,
        },
        "runs": [
            {"local_bytes": limit * MIB, "elapsed_s": seconds, "page_in_bytes": 4096}
            for limit, seconds in zip((75, 50), real_s, strict=True)
        ],
        "whole": [{"elapsed_s": each} for each in whole_s],
        "recommended": [{"elapsed_s": each} for each in recommended_s],
    }


def test_what_was_foreseen_is_kept() -> None:
    text, is_kept = tables.verdict([job()])
    assert is_kept
    assert "median error 0%" in text


@pytest.mark.parametrize(
    "broken",
    [
        {"real_s": (15.0, 24.0)},  # median: 20 and 17 %
        {"real_s": (12.0, 14.0)},  # worst: 43 %
        {"recommended_s": (12.1, 24.2, 12.1)},  # 1.21 for a wanted 1.1
        {"recommended_s": (9.9, 19.8, 9.9)},
    ],
)
def test_what_was_not_is_noticed(broken: dict[str, Any]) -> None:
    assert not tables.verdict([job(**broken)])[1]


def test_a_machine_that_slows_down_between_pairs_changes_no_slowdown() -> None:
    assert tables.slowdown_errors([job()]) == [pytest.approx(0.0)]


def test_the_table_has_each_run_and_each_recommendation() -> None:
    rows = tables.table([job()]).splitlines()
    assert rows[2] == "| a job | 75 MiB (75%) | 12.0 s | 12.0 s | +0% | 100 | 1 |"
    assert rows[-1] == "| a job | 90 MiB | 1.1 | 1.10 |"


def test_the_least_is_only_wrong_where_it_is_more() -> None:
    assert tables.verdict([job((30.0, 90.0), source="at least")])[1]
    assert not tables.verdict([job((8.0, 90.0), source="at least")])[1]
    assert "| ≥ 20.0 s | 90.0 s |" in tables.table([job((12.0, 90.0), source="at least")])
