# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan`: the curve of page-ins, the prediction, and what earlier plans leave."""

from __future__ import annotations

import os
import random
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.planning import history
from infiniswap.planning.misses import Curve, First, Look, Miss, first_of, misses
from infiniswap.planning.prediction import Measured, Model, Probe, fit
from infiniswap.planning.watch import Reached, WholeWatch
from infiniswap.system import touched
from infiniswap.system.block_trace import DISCARD, READ, WRITE, PageEvents
from infiniswap.units import MIB, PAGE_BYTES

PAGES = 4000
"""Of the job in these tests."""
PEAK = PAGES * PAGE_BYTES
LOCAL = PAGES // 2


class Lru:
    """A host that pages out what was used least recently, and its swap area.

    Args:
        limit: pages in memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.events = PageEvents(array("Q"), array("B"), array("Q"), 1, 0)
        self.looks: list[Look] = []
        self.ins = 0
        self._resident: OrderedDict[int, bool] = OrderedDict()  # whether it has changed
        self._out: set[int] = set()

    def use(self, page: int, *, changes: bool) -> None:
        """The job uses a page."""
        dirty = changes
        if page in self._resident:
            dirty |= self._resident.pop(page)
        elif page in self._out:
            self._tell(READ, page)
            self.ins += 1
            self._out.discard(page)
        else:
            dirty = True
        self._resident[page] = dirty
        while len(self._resident) > self.limit:
            gone, changed = self._resident.popitem(last=False)
            if changed:
                self._tell(WRITE, gone)
            self._out.add(gone)

    def look(self, work_s: float) -> None:
        """Notes what a plan sees."""
        cached = sum(not dirty for dirty in self._resident.values())
        used = (len(self._resident) + len(self._out)) * PAGE_BYTES
        out = len(self._out) * PAGE_BYTES
        limit = self.limit * PAGE_BYTES
        self.looks.append(
            Look(len(self.events.pages), work_s, limit, used, cached * PAGE_BYTES, out)
        )

    def _tell(self, kind: int, page: int) -> None:
        self.events.at_ns.append(len(self.events.pages))
        self.events.kinds.append(kind)
        self.events.pages.append(page)

    def curve(self) -> Curve:
        """What the trace tells."""
        return Curve(misses(self.events, self.looks), self.looks, PEAK)


def run(limit: int, uses: Iterable[int], *, changes: bool, every: int = 100) -> Lru:
    """Fills the memory, then uses it."""
    host = Lru(limit)
    host.look(0.0)
    for page in range(PAGES):
        host.use(page, changes=True)
    for count, page in enumerate(uses):
        if count % every == 0:
            host.look(count / 1e4)
        host.use(page, changes=changes)
    host.look(10.0)
    return host


def at_random(count: int = 30_000) -> list[int]:
    chance = random.Random(1)
    return [chance.randrange(PAGES) for _ in range(count)]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_a_run_with_half_of_the_memory_tells_the_page_ins_with_more(
    share: float, changes: bool
) -> None:
    half = run(LOCAL, at_random(), changes=changes)
    more = run(round(share * PAGES), at_random(), changes=changes)
    assert half.curve().at(PEAK // 2) == pytest.approx(half.ins, rel=0.06)
    assert half.curve().at(round(share * PEAK)) == pytest.approx(more.ins, rel=0.12)


@pytest.mark.parametrize("changes", [False, True])
def test_a_scan_needs_all_of_it(changes: bool) -> None:
    half = run(LOCAL, list(range(PAGES)) * 5, changes=changes).curve()
    assert half.at(PEAK * 9 // 10) == pytest.approx(5 * PAGES, rel=0.05)


def test_a_part_that_is_used_again_and_again_needs_no_more_than_that() -> None:
    hot = PAGES * 6 // 10
    uses = list(range(hot)) * 5
    curve = run(LOCAL, uses, changes=True).curve()
    assert curve.at(PEAK // 2) == pytest.approx(5 * hot, rel=0.05)
    more = run(round(0.65 * PAGES), uses, changes=True)
    assert more.ins == hot  # only the first time
    assert curve.at(round(0.65 * PEAK)) == pytest.approx(more.ins, rel=0.2)


def test_a_page_that_is_freed_is_out_of_the_order() -> None:
    at = array("Q", range(5))
    kinds = array("B", [WRITE, WRITE, WRITE, DISCARD, READ])
    events = PageEvents(at, kinds, array("Q", [1, 2, 3, 2, 1]), 1, 0)
    looks = [Look(0, 0.0, 10 * PAGE_BYTES, PEAK, 0, 0)]
    assert [miss.needs_bytes for miss in misses(events, looks)] == [12 * PAGE_BYTES]


def test_a_page_before_the_first_look_is_left_out() -> None:
    events = PageEvents(array("Q", [1, 2]), array("B", [WRITE, READ]), array("Q", [7, 7]), 1, 0)
    assert list(misses(events, [Look(3, 0.0, PEAK // 2, PEAK, 0, 0)])) == []


def test_of_many_pages_some_stand_for_all() -> None:
    host = run(LOCAL, at_random(), changes=True)
    all_of_it = host.curve()
    kept = [place for place, page in enumerate(host.events.pages) if page // 16 % 4 == 0]
    host.events = PageEvents(
        array("Q", [host.events.at_ns[place] for place in kept]),
        array("B", [host.events.kinds[place] for place in kept]),
        array("Q", [host.events.pages[place] for place in kept]),
        4,
        0,
    )
    assert {miss.weight for miss in misses(host.events, host.looks)} == {4}
    for share in (50, 60, 75, 90):
        limit = PEAK * share // 100
        assert host.curve().at(limit) == pytest.approx(all_of_it.at(limit), rel=0.15)


def test_what_only_a_part_of_the_run_could_see_stands_for_all_of_it() -> None:
    looks = [
        Look(0, 0.0, PEAK // 2, PEAK, 0, 0),
        Look(1, 1.0, PEAK * 3 // 4, PEAK, 0, 0),
        Look(2, 4.0, PEAK * 3 // 4, PEAK, 0, 0),
    ]
    low = Miss(PEAK // 2, PEAK * 6 // 10, 100.0)
    high = Miss(PEAK * 3 // 4, PEAK * 9 // 10, 50.0)
    curve = Curve([low, high], looks, PEAK)
    assert curve.at(PEAK * 8 // 10) == 50.0
    assert curve.at(PEAK // 2) == 4 * 100.0 + 50.0
    assert curve.at(PEAK) == 0.0


def test_memory_that_the_job_had_not_yet_is_no_reason_to_scale() -> None:
    looks = [
        Look(0, 0.0, PEAK, PEAK // 4, 0, 0),
        Look(1, 3.0, PEAK // 2, PEAK // 4, 0, 0),
        Look(2, 4.0, PEAK // 2, PEAK, 0, 0),
    ]
    curve = Curve([Miss(PEAK // 2, PEAK * 6 // 10, 100.0)], looks, PEAK)
    assert curve.at(PEAK // 2) == 100.0


@pytest.mark.parametrize(("after_s", "scale"), [(0.0, 1.0), (1.0, 10.0)])
def test_pages_count_although_no_work_was_measured_with_the_limit(
    after_s: float, scale: float
) -> None:
    looks = [
        Look(0, 0.0, PEAK // 2, PEAK, 0, 0),
        Look(1, 0.0, 2 * PEAK, PEAK, 0, 0),
        Look(2, after_s, 2 * PEAK, PEAK, 0, 0),
    ]
    curve = Curve([Miss(PEAK // 2, PEAK * 6 // 10, 7.0)], looks, PEAK)
    assert curve.at(PEAK // 2) == 7.0 * scale


def test_of_the_first_pages_that_went_out_some_came_back() -> None:
    kinds = array("B", [WRITE, WRITE, WRITE, READ, DISCARD, READ, WRITE, READ])
    events = PageEvents(array("Q", range(8)), kinds, array("Q", [1, 2, 3, 1, 2, 2, 4, 4]), 1, 0)
    at = round(PAGE_BYTES / 0.06)
    assert first_of(events, 3 * at) == First(3, 1 / 3)  # 2 was freed, then read
    assert first_of(events, 4 * at) == First(4, 2 / 4)
    assert first_of(events, 100 * at) == First(4, 2 / 4)
    assert first_of(events, 0) == First(0, 0.0)


def test_however_high_the_limit_some_of_the_first_pages_come_back() -> None:
    curve = Curve([], [], PEAK, First(240, 0.5))
    assert curve.at(PEAK - 100 * PAGE_BYTES) == 50
    assert curve.at(PEAK // 2) == curve.at(PEAK * 9 // 10) == 120
    assert curve.at(PEAK) == 0.0


def test_below_the_lowest_limit_the_curve_goes_on_as_steeply() -> None:
    looks = [Look(0, 0.0, PEAK // 2, PEAK, 0, 0), Look(1, 1.0, PEAK // 2, PEAK, 0, 0)]
    found = [Miss(PEAK // 2, PEAK * share // 100, 10.0) for share in range(51, 100)]
    curve = Curve(found, looks, PEAK)
    assert curve.at(PEAK // 4) == pytest.approx(curve.at(PEAK // 2) * 1.5, rel=0.05)


def test_what_comes_back_when_there_is_no_limit_does_not_count() -> None:
    looks = [Look(0, 0.0, PEAK // 2, PEAK, 0, 0), Look(1, 1.0, 2 * PEAK, PEAK, 0, 0)]
    found = [Miss(PEAK // 2, PEAK * 6 // 10, 10.0), Miss(2 * PEAK, 3 * PEAK, 70.0)]
    assert Curve(found, looks, PEAK).at(PEAK // 2) == 10.0


def test_a_page_that_needs_hardly_more_counts_under_the_limit_that_it_came_in_with() -> None:
    limit = PEAK // 2 - 3 * PAGE_BYTES  # between two limits of the grid
    looks = [Look(0, 0.0, limit, PEAK, 0, 0), Look(1, 1.0, limit, PEAK, 0, 0)]
    curve = Curve([Miss(limit, limit + PAGE_BYTES, 100.0)], looks, PEAK)
    assert curve.at(limit) == pytest.approx(100.0, rel=0.01)
    assert curve.at(PEAK * 6 // 10) == 0.0


# ---------------------------------------------------------------------------- prediction

MISSES = st.lists(
    st.builds(
        Miss,
        st.integers(10 * MIB, 40 * MIB),
        st.integers(10 * MIB, 80 * MIB),
        st.floats(1, 5000),
    ),
    max_size=50,
)


def model_of(found: Sequence[Miss], elapsed_s: float = 5.0, **changes: Any) -> Model:
    looks = (Look(0, 0.0, 10 * MIB, 64 * MIB, 0, 0), Look(1, 2.0, 40 * MIB, 64 * MIB, 0, 0))
    probe = Probe(elapsed_s, 1.0, 10 * MIB, 30_000, 30_000, found, looks)
    return fit(2.0, 64 * MIB, replace(probe, **changes), (Measured(5000.0, 0.2),))


@given(MISSES, st.floats(0.0, 20.0), st.integers(0, 100_000), st.integers(0, 100_000))
def test_more_memory_never_predicts_more_time(
    found: list[Miss], elapsed_s: float, ins: int, outs: int
) -> None:
    model = model_of(found, elapsed_s, page_ins=ins, page_outs=outs)
    points = [model.at(size * MIB) for size in range(0, 80, 3)]
    for less, more in pairwise(points):
        assert more.elapsed_s <= less.elapsed_s
        assert more.page_ins <= less.page_ins
        assert more.remote_bytes <= less.remote_bytes
    assert model.at(model.peak_bytes).page_ins == 0


@given(MISSES, st.floats(1.01, 3.0))
def test_the_smallest_limit_keeps_the_slowdown_and_one_mib_less_does_not(
    found: list[Miss], slowdown: float
) -> None:
    model = model_of(found)
    best = model.smallest(slowdown)
    assert best.slowdown <= slowdown
    if best.limit_bytes < model.peak_bytes:
        assert best.limit_bytes == MIB or model.at(best.limit_bytes - MIB).slowdown > slowdown


def test_the_run_with_a_limit_is_met_where_it_was_measured() -> None:
    host = run(LOCAL, at_random(), changes=True)
    writes = sum(kind == WRITE for kind in host.events.kinds)
    found = tuple(misses(host.events, host.looks))
    probe = Probe(40.0, 1.0, PEAK // 2, host.ins, writes, found, host.looks)
    point = fit(10.0, PEAK, probe).at(PEAK // 2)
    assert point.elapsed_s == pytest.approx(40.0, rel=0.05)
    assert point.page_ins == pytest.approx(host.ins, rel=0.05)


def test_without_a_trace_page_ins_fall_evenly() -> None:
    looks = (Look(0, 0.0, PEAK // 2, PEAK, 0, 0), Look(1, 1.0, PEAK // 2, PEAK, 0, 0))
    model = fit(10.0, PEAK, Probe(20.0, 1.0, PEAK // 2, 8000, 8000, (), looks))
    assert model.at(PEAK // 2).page_ins == pytest.approx(8000, rel=0.03)
    assert model.at(PEAK * 3 // 4).page_ins == pytest.approx(4000, rel=0.06)


def test_without_pages_in_that_run_earlier_plans_tell_the_cost() -> None:
    idle = Probe(2.0, 1.0, 10 * MIB, 0, 0, (), ())
    cheap, dear = (fit(2.0, 64 * MIB, idle, (Measured(10_000.0, lost_s),)) for lost_s in (0.1, 1.0))
    assert cheap.page_s == pytest.approx(1e-5)
    assert dear.page_s == pytest.approx(1e-4)
    assert dear.from_history == 1.0


def test_progress_tells_the_time_that_it_took() -> None:
    watch = WholeWatch()
    assert watch.time_at(1.0) == 0.0
    watch.progress += [Reached(1.0, 0.5), Reached(3.0, 2.5), Reached(4.0, 2.5)]
    assert watch.time_at(1.5) == 2.0
    assert watch.time_at(0.25) == 0.5
    assert watch.time_at(9.0) == 4.0


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
