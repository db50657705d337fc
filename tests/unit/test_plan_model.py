# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan`: the curve of page-ins, the prediction, and what earlier plans leave."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.planning import history
from infiniswap.planning.misses import Sample, peak_bytes, time_at, traffic
from infiniswap.planning.prediction import Measured, Probe, fit, limit_of, measured
from infiniswap.system import touched
from infiniswap.units import MIB, PAGE_BYTES

SIZE = 100 * MIB


def uses(passes: int, steps: int = 10, size: int = SIZE) -> list[Sample]:
    """A job that uses its memory from end to end, again and again; one window for each pass."""
    return [
        Sample(window, (at := window + step / steps), at, size, size * step // steps, size)
        for window in range(passes)
        for step in range(steps + 1)
    ]


SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 64), st.integers(0, 64), st.integers(0, 8)),
    max_size=40,
).map(
    lambda rows: [
        Sample(
            sum(row[0] == 0 for row in rows[: place + 1]),
            place / 10,
            place / 10,
            resident * MIB,
            min(resident, referenced) * MIB,
            (resident + more) * MIB,
        )
        for place, (_, resident, referenced, more) in enumerate(rows)
    ]
)


def test_a_limit_at_the_peak_moves_nothing() -> None:
    samples = uses(5)
    assert peak_bytes(samples) == SIZE
    assert traffic(samples, SIZE).ins == traffic(samples, SIZE).outs == 0


def test_a_pass_misses_every_page_at_a_low_limit_and_fewer_at_a_high_one() -> None:
    pages = SIZE // PAGE_BYTES
    low, half, high = (traffic(uses(4), SIZE * share // 100) for share in (5, 50, 90))
    assert 4 * pages * 0.95 < low.ins <= 4 * pages
    assert 4 * pages * 0.8 < half.ins < 4 * pages * 0.9  # 0.5 ln 2 + 0.5
    assert high.ins < 4 * pages * 0.4
    assert half.outs == pages / 2


def test_memory_that_is_freed_without_being_used_costs_nothing() -> None:
    kept = Sample(0, 1.0, 1.0, SIZE, SIZE // 4, SIZE)
    freed = Sample(0, 2.0, 2.0, SIZE // 4, SIZE // 4, SIZE // 4)
    used = Sample(0, 2.0, 2.0, SIZE, SIZE, SIZE)
    assert traffic([kept, freed], SIZE // 8).ins == 0
    # At the limit, three quarters are idle before and none after: the mean is below what is out.
    assert traffic([kept, used], SIZE // 2).ins == SIZE * 3 / 4 / PAGE_BYTES


def test_a_new_window_is_no_use_of_memory() -> None:
    full = Sample(0, 1.0, 1.0, SIZE, SIZE, SIZE)
    cleared = Sample(1, 1.0, 1.0, SIZE, 0, SIZE)
    assert traffic([cleared, full], SIZE // 2).ins == 0
    assert traffic([full, cleared], SIZE // 2).ins == 0


@given(SAMPLES, st.floats(0.0, 20.0), st.integers(0, 100_000), st.integers(0, 100_000))
def test_more_memory_never_predicts_more_time(
    samples: list[Sample], elapsed_s: float, ins: int, outs: int
) -> None:
    probe = Probe(20 * MIB, elapsed_s, None, ins, outs)
    model = fit(samples, 2.0, probe, (Measured(5000.0, 0.2),))
    points = [model.at(size * MIB) for size in range(0, 80, 3)]
    for less, more in pairwise(points):
        assert more.elapsed_s <= less.elapsed_s
        assert more.page_ins <= less.page_ins
        assert more.remote_bytes <= less.remote_bytes
    assert model.at(model.peak_bytes).elapsed_s == 2.0


@given(SAMPLES, st.floats(1.01, 3.0))
def test_the_smallest_limit_keeps_the_slowdown_and_one_mib_less_does_not(
    samples: list[Sample], slowdown: float
) -> None:
    model = fit(samples, 2.0, Probe(20 * MIB, 5.0, None, 30_000, 30_000))
    best = model.smallest(slowdown)
    assert best.slowdown <= slowdown
    assert best.limit_bytes == MIB or model.at(best.limit_bytes - MIB).slowdown > slowdown


def test_the_probe_is_met_where_it_was_measured() -> None:
    samples, limit = uses(10), limit_of(SIZE, 50)
    model = fit(samples, 10.0, Probe(limit, 40.0, None, 250_000, 12_800))
    point = model.at(limit)
    assert point.elapsed_s == pytest.approx(40.0, rel=0.03)
    assert point.page_ins == pytest.approx(250_000, rel=0.01)
    other = limit_of(SIZE, 75)
    raised = 250_000 / traffic(samples, limit).ins
    assert model.at(other).page_ins == pytest.approx(raised * traffic(samples, other).ins, rel=0.01)


def test_a_probe_that_was_cut_is_compared_with_as_much_work() -> None:
    samples, limit = uses(10), limit_of(SIZE, 50)
    whole = Probe(limit, 40.0, None, 250_000, 12_800)
    cut = Probe(limit, 10.0, 2.5, 62_500, 12_800)
    assert measured(samples, 10.0, cut).lost_s == pytest.approx(7.5, rel=0.05)
    one, other = (fit(samples, 10.0, probe).at(limit_of(SIZE, 35)) for probe in (whole, cut))
    assert other.elapsed_s == pytest.approx(one.elapsed_s, rel=0.1)


def test_uses_too_quick_for_the_looks_count_as_random() -> None:
    blind = [Sample(0, at, at, SIZE, SIZE, SIZE) for at in (0.0, 5.0, 10.0)]
    model = fit(blind, 10.0, Probe(SIZE // 2, 10.0, 5.0, 60_000, 12_800))
    assert model.at(SIZE // 2).page_ins == pytest.approx(120_000)
    assert model.at(SIZE * 3 // 4).page_ins == pytest.approx(60_000)


def test_without_pages_in_the_probe_earlier_plans_tell_the_cost() -> None:
    samples = uses(10)
    idle = Probe(limit_of(SIZE, 50), 1.0, 0.0, 0, 0)
    cheap, dear = (fit(samples, 10.0, idle, (Measured(10_000.0, lost_s),)) for lost_s in (0.1, 1.0))
    assert cheap.page_s == pytest.approx(1e-5)
    assert dear.page_s == pytest.approx(1e-4)
    assert dear.from_history == 1.0
    assert fit(samples, 10.0, None, (Measured(10_000.0, 1.0),)).page_s == pytest.approx(1e-4)


def test_progress_tells_the_time_that_it_took() -> None:
    samples = [Sample(0, at, user, 0, 0, 0) for at, user in ((1.0, 0.5), (3.0, 2.5), (4.0, 2.5))]
    assert time_at(samples, 1.5) == 2.0
    assert time_at(samples, 0.25) == 0.5
    assert time_at(samples, 9.0) == 4.0
    assert time_at([], 1.0) == 0.0


# ------------------------------------------------------------------------------- history


def test_history_keeps_the_last_ones_and_forgets(tmp_path: Path) -> None:
    path = history.path_in(tmp_path / "state")
    assert history.read(path) == ()
    for number in range(100):
        history.add(path, Measured(float(number), 1.0))
    kept = history.read(path)
    assert [each.pages for each in kept] == [float(number) for number in range(36, 100)]
    assert history.forget(path) == 64
    assert history.read(path) == ()
    assert history.forget(path) == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"pages": "many"}]'])
def test_a_history_that_is_none_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = history.path_in(tmp_path)
    path.write_text(text)
    assert history.read(path) == ()
    history.add(path, Measured(1.0, 2.0))
    assert history.read(path) == (Measured(1.0, 2.0),)


# ------------------------------------------------------------------------------ counters

ROLLUP = """\
5581-7ffd ---p 00000000 00:00 0                          [rollup]
Rss:               10000 kB
Pss:                4000 kB
Pss_Anon:           3000 kB
Referenced:         5000 kB
Swap:                200 kB
SwapPss:             100 kB
"""


def _process(proc: Path, pid: int, stat: str = "") -> Path:
    directory = proc / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "smaps_rollup").write_text(ROLLUP)
    (directory / "stat").write_text(stat)
    return directory


def test_shared_pages_count_in_parts(tmp_path: Path) -> None:
    for pid in (7, 8):
        _process(tmp_path, pid)
    found = touched.touched([7, 8, 9], proc=tmp_path)
    assert found.resident_bytes == 2 * 4000 * 1024
    assert found.referenced_bytes == 2 * 2000 * 1024
    assert found.swapped_bytes == 2 * 100 * 1024


def test_clearing_writes_to_processes_that_live(tmp_path: Path) -> None:
    directory = _process(tmp_path, 7)
    (directory / "clear_refs").touch()
    touched.clear([6, 7], proc=tmp_path)
    assert (directory / "clear_refs").read_text() == "1"


def test_user_time_outlives_processes_and_their_numbers(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat = "7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 {user} 9 0 0 20 0 1 0 {start} 0 0"
    directory = _process(tmp_path, 7, stat.format(user=3 * tick, start=50))
    user = touched.UserTime(tmp_path)
    assert user.add([7]) == 3.0
    assert user.add([]) == 3.0
    (directory / "stat").write_text(stat.format(user=2 * tick, start=51))
    assert user.add([7]) == 5.0
    assert user.add([7, 99]) == 5.0


@pytest.mark.parametrize(
    ("syscall", "target", "waits"),
    [
        ("0 0x3 0x7f00 0x400 0x0 0x0 0x0 0x7ffe 0x7f01", "/dev/pts/4", True),
        ("0 0x3 0x7f00 0x400 0x0 0x0 0x0 0x7ffe 0x7f01", "pipe:[5]", False),
        ("1 0x3 0x7f00 0x400 0x0 0x0 0x0 0x7ffe 0x7f01", "/dev/pts/4", False),
        ("0 0x9 0x7f00 0x400 0x0 0x0 0x0 0x7ffe 0x7f01", "/dev/pts/4", False),
        ("running", "/dev/pts/4", False),
    ],
)
def test_a_process_that_waits_for_the_terminal(
    tmp_path: Path, syscall: str, target: str, waits: bool
) -> None:
    directory = _process(tmp_path, 7)
    (directory / "syscall").write_text(syscall)
    (directory / "fd" / "3").symlink_to(target)
    assert touched.reads_terminal([7, 8], proc=tmp_path) is waits
