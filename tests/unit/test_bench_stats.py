# SPDX-License-Identifier: Apache-2.0
"""tools/bench: the arithmetic of the benchmarks, and what they read from /proc."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isw_bench import ratio_plot, results, stats
from isw_bench.peers import process
from isw_bench.results import Comparison, Figure, Samples, at_least, at_most

VALUES = st.lists(st.floats(min_value=1e-6, max_value=1e9), min_size=1, max_size=50)


@given(VALUES)
def test_median_and_quartiles_agree_with_the_standard_library(values: list[float]) -> None:
    found = stats.spread(values)
    assert found.median == pytest.approx(statistics.median(values))
    if len(values) > 1:
        q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
        assert found.q1 == pytest.approx(q1)
        assert found.q3 == pytest.approx(q3)
    assert found.count == len(values)


@given(VALUES, st.floats(min_value=0, max_value=1))
def test_a_quantile_lies_among_the_values(values: list[float], q: float) -> None:
    found = stats.quantile(values, q)
    assert min(values) <= found <= max(values) or found == pytest.approx(min(values))


def test_infinite_ratios_have_quartiles() -> None:
    found = stats.spread([1.0, 1.0, 1.0, math.inf, math.inf])
    assert (found.q1, found.median, found.q3) == (1.0, 1.0, math.inf)
    assert stats.spread([2.0, math.inf, math.inf]).q1 == math.inf


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="values"):
        stats.quantile([], 0.5)
    with pytest.raises(ValueError, match="between"):
        stats.quantile([1.0], 1.5)


def test_ratios_are_of_the_same_round() -> None:
    # The medians' ratio would be 1: only the pairs show that we were twice as slow.
    assert stats.pair_ratios([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="rounds"):
        stats.pair_ratios([1.0], [1.0, 2.0])


def test_nothing_measured_on_the_other_side_is_no_good_ratio() -> None:
    assert stats.pair_ratios([1.0, 0.0], [0.0, 0.0]) == [math.inf, 1.0]
    figure = Figure("x", "s", [1.0], [0.0], "peer", target=at_most(1.0))
    assert figure.verdict == "miss"


@pytest.mark.parametrize(
    ("ours", "target", "verdict"),
    [
        ([0.7, 0.74, 0.9], at_most(0.75), "pass"),
        ([0.7, 0.76, 0.9], at_most(0.75), "miss"),
        ([1.4, 1.6, 9.0], at_least(1.5), "pass"),
        ([1.4, 1.4, 9.0], at_least(1.5), "miss"),
        ([1.4, 1.4, 9.0], None, ""),
    ],
)
def test_a_verdict_is_on_the_median_ratio(
    ours: list[float], target: results.Target | None, verdict: str
) -> None:
    assert Figure("x", "s", ours, [1.0] * 3, "peer", target=target).verdict == verdict


def test_an_advantage_says_how_many_times_better() -> None:
    lower = Figure("x", "s", [3.0, 9.0], [9.0, 3.0], "peer")
    higher = Figure("x", "MB/s", [3.0, 9.0], [6.0, 2.0], "peer", better="higher")
    assert (lower.best_ratio, higher.best_ratio) == (1.0, 1.5)  # apart from the pairs
    for figure in (
        Figure("x", "s", [1.0, 2.0, 4.0], [4.0, 4.0, 4.0], "peer"),
        Figure("x", "MB/s", [4.0, 2.0, 1.0], [1.0, 1.0, 1.0], "peer", better="higher"),
    ):
        median, low, high = ratio_plot.advantages(figure)
        assert median == figure.advantage == 2.0
        assert low < median < high  # of the ratio they have changed places


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0123, "0.0123"), (1.234, "1.23"), (98765.4, "98765"), (math.inf, "∞")],
)
def test_values_are_shown_with_about_three_digits(value: float, text: str) -> None:
    assert results.format_value(value) == text


def test_results_are_json_and_markdown() -> None:
    samples = Samples()
    for value in (1.0, 2.0):
        samples.add("a", x=value)
        samples.add("b", x=2 * value)
    figure = Figure("x", "s", samples.of("a", "x"), samples.of("b", "x"), "b", target=at_most(1))
    done = Comparison("key", "Title", [figure], samples.values, notes=["a note"])
    skipped = Comparison("other", "Other", skipped="needs root")
    data = results.as_json([done, skipped], {"machine": {}})["comparisons"]
    assert data["key"]["figures"][0]["ratio"]["median"] == 0.5
    assert data["key"]["figures"][0]["verdict"] == "pass"
    assert data["key"]["samples"] == {"a": {"x": [1, 2]}, "b": {"x": [2, 4]}}
    assert data["other"]["skipped"] == "needs root"
    text = results.markdown([done, skipped])
    assert "| x, s | 1.50 | b: 3.00 | 0.500 | 0.500 | ≤ 1 | pass |" in text
    assert "Not run: needs root" in text


_SMAPS = """\
7f0000000000-7f0000040000 rw-p 00000000 00:00 0
Size:                256 kB
Rss:                   8 kB
VmFlags: rd wr mr mw me lo ac
7f0000100000-7f0000101000 r-xp 00000000 08:01 42     /usr/lib/libc.so.6
Rss:                   4 kB
VmFlags: rd ex mr mw me
"""


def test_mappings_are_read_from_smaps() -> None:
    first, second = process.parse_smaps(_SMAPS)
    assert (first.end - first.start, first.resident_bytes) == (256 * 1024, 8192)
    assert first.locked
    assert not second.locked
    assert second.name == "/usr/lib/libc.so.6"


def test_a_processor_that_numpy_refuses_costs_the_picture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise RuntimeError('your machine has no X86_V2')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    figure = Figure("x", "s", [1.0], [2.0], "peer")
    assert not ratio_plot.draw([Comparison("key", "Title", [figure])], tmp_path / "x.png", "")
