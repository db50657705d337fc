# SPDX-License-Identifier: Apache-2.0
"""tools/bench: the arithmetic of `make bench-faults`, its options, and what it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isw_bench import faults, paper, results, suite
from isw_bench.faults import host, jobs, time_line_plot, timeline, times
from isw_bench.faults.timeline import Run
from isw_bench.results import Comparison, Samples, TimeLine

from infiniswap.device.slabs.mapper import SlabMapper
from infiniswap.device.slabs.placer import Placer
from infiniswap.errors import SystemCallError, UsageError

OPS = st.lists(st.integers(min_value=0, max_value=10_000), min_size=1, max_size=80)


def steps(*parts: tuple[float, int], slice_s: float = 0.1) -> Run:
    """So many seconds of so many operations a second, one after the other."""
    ops = [
        round(per_s * slice_s) for seconds, per_s in parts for _ in range(round(seconds / slice_s))
    ]
    return Run(slice_s, ops)


# --------------------------------------------------------------------------- devices


def test_a_device_is_timed_where_its_placer_is_made() -> None:
    """timed_device puts its own in the place of that name."""
    assert "Placer" in SlabMapper.__init__.__code__.co_names
    assert SlabMapper.__init__.__globals__["Placer"] is Placer


# -------------------------------------------------------------------------- time lines


@given(OPS, st.integers(min_value=1, max_value=20))
def test_every_window_is_the_mean_of_its_slices(ops: list[int], slices: int) -> None:
    found = timeline.moving(Run(0.1, ops), slices * 0.1)
    assert len(found) == max(0, len(ops) - slices + 1)
    for first, value in enumerate(found):
        assert value == pytest.approx(sum(ops[first : first + slices]) / (slices * 0.1))


def test_the_level_and_the_worst_second_of_a_part_of_a_run() -> None:
    run = steps((2.0, 100), (2.0, 1000))
    assert run.per_s == pytest.approx(550)
    assert timeline.per_s(run, 0.0, 2.0) == timeline.lowest_per_s(run) == pytest.approx(100)
    assert timeline.per_s(run, 2.0) == timeline.lowest_per_s(run, 2.0) == pytest.approx(1000)
    assert timeline.per_s(run, 9.0) == 0.0
    assert timeline.lowest_per_s(run, 3.9) == 0.0  # no whole second is left
    assert timeline.left_s(run, 1.0) == pytest.approx(3.0)
    assert timeline.left_s(run, 20.0) == 0.0


@pytest.mark.parametrize(
    ("parts", "fault_s", "recovered_s"),
    [
        # The window that begins 0.1 s before the end of the outage still has 91 % of the level.
        (((2.0, 1000), (3.0, 100), (5.0, 1000)), 2.0, 2.9),
        (((8.0, 1000),), 2.0, 0.0),  # nobody noticed it
        (((3.5, 1000), (2.0, 100), (4.5, 1000)), 2.0, 3.4),  # a dip that comes late
        (((3.5, 1000), (2.0, 100), (4.5, 1000)), 9.9, 0.1),  # no whole second is left
        (((2.0, 1000), (6.0, 800)), 2.0, 6.0),  # it does not recover
    ],
)
def test_a_job_has_recovered_with_the_first_whole_second_at_its_level(
    parts: tuple[tuple[float, int], ...], fault_s: float, recovered_s: float
) -> None:
    assert timeline.recovered_s(steps(*parts), fault_s, 1000.0) == pytest.approx(recovered_s)


def test_work_lost_does_not_depend_on_the_length_of_the_run() -> None:
    for seconds in (4.0, 40.0):
        base = steps((seconds + 2.0, 1000))
        fault = steps((1.0, 1000), (2.0, 0), (seconds - 1.0, 1000))
        assert timeline.work_lost_s(base, fault) == pytest.approx(2.0)
    assert timeline.work_lost_s(steps((1.0, 0)), steps((1.0, 0))) == 0.0


# ----------------------------------------------------------------------------- figures


def two_rounds() -> tuple[Samples, list[TimeLine]]:
    samples, lines = Samples(), list[TimeLine]()
    told = {"fault_us": {"p50": 100.0, "p99": 500.0, "count": 7}}
    for lost in (0, 400):
        fault = steps((2.0, 1000), (2.0, 1000 - lost))
        pair = jobs.Pair(steps((4.0, 1000)), Run(0.1, fault.ops, [2.0]), told, told)
        jobs.keep(samples, lines, "Title: more", "disk", pair)
        jobs.keep_recovery(samples, "disk", pair)
    return samples, lines


def test_a_loss_is_of_the_neighbour_of_the_same_round_and_the_worst_is_judged_alone() -> None:
    samples, _ = two_rounds()
    figure = jobs.throughput(samples, "disk", "x", results.at_least(1 - paper.LOST_WITH_DONOR))
    assert figure.ratio.median == pytest.approx(0.9)
    assert figure.verdict == "pass"
    assert jobs.recovery(samples, "disk").ours == [0.0, pytest.approx(2.0)]
    assert "0.00 to 0.80 s" in jobs.recovery_note(samples, "disk")
    worst = jobs.worst_round(samples, "disk", 0.85)
    assert worst.ratio.median == pytest.approx(0.8)
    assert worst.ratio.count == 1
    assert worst.verdict == "miss"


def test_lines_go_to_panels_and_into_the_json() -> None:
    samples, lines = two_rounds()
    comparison = Comparison("key", "Title: more", (), samples.values, lines=lines)
    assert list(time_line_plot.panels([comparison])) == ["Title, backup on the disk"]
    found = results.as_json([comparison], {})["comparisons"]["key"]["lines"]
    assert json.loads(json.dumps(found))[1]["events"] == [2.0]


def test_a_drawn_point_is_the_mean_of_the_time_before_it() -> None:
    seconds, values = time_line_plot.shares(TimeLine("p", "s", 0.1, [10.0] * 10), 200.0)
    assert seconds[0] == pytest.approx(0.3)
    assert seconds[-1] == pytest.approx(1.0)
    assert values == pytest.approx([0.5] * 8)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples, lines = two_rounds()
    figures = [jobs.lowest(samples, "disk"), jobs.tail(samples, "disk")]
    comparison = Comparison("key", "Title", figures, samples.values, lines=lines)
    assert time_line_plot.draw([comparison], tmp_path / "x.png", "caption")
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert not time_line_plot.draw([Comparison("key", "Title")], tmp_path / "y.png", "caption")


# ------------------------------------------------------------------------ what is read


def test_what_redis_benchmark_prints_is_read() -> None:
    text = (
        '\rSET: rps=0.0 (overall: nan) avg_msec=nan (overall: nan)\r"test","rps",'
        '"avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms",'
        '"max_latency_ms"\n"SET","41666.67","0.10","0.05","0.103","0.199","0.423","3.1"\n'
    )
    found = host.parse(text)
    assert found == {"requests_per_s": 41666.67, "p50_ms": 0.103, "p99_ms": 0.423, "max_ms": 3.1}
    with pytest.raises(SystemCallError, match="redis-benchmark"):
        host.parse("Could not connect")


def test_times_of_slabs_are_medians_by_kind(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(
        "".join(
            json.dumps({"map_ms": ms, "is_first": first}) + "\n"
            for ms, first in ((40.0, True), (60.0, True), (5.0, False), (7.0, False))
        )
    )
    samples = Samples()
    times.keep(samples, times.mapped_in(file), [{"evict_ms": 3.0, "ask_ms": 1.5}])
    assert samples.of(times.OURS, "map_ms") == [6.0]
    assert samples.of(times.OURS, "map_first_ms") == [50.0]
    found = times.figures(samples)
    assert [figure.verdict for figure in found] == ["pass", "", "pass", "miss", "", ""]


# ----------------------------------------------------------------------------- options


def settings(*args: str) -> object:
    return suite.parse(faults.SUITE, list(args))[1]


def test_the_defaults_can_work() -> None:
    assert settings() == settings("eviction", "donor-death", "peak", "host", "cache", "times")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("evictions",), "no comparison 'evictions'"),
        (("--rounds", "0"), "--rounds"),
        (("--seconds", "1"), "--seconds"),
        (("--job-limit", "256M"), "--job-limit"),
        (("--device-size", "128M"), "--device-size"),
        (("--slab", "128M"), "--slab"),
        (("--slab", "20M"), "multiple"),
        (("--host-memory", "64M"), "--host-memory"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        settings(*args)
