# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.ahead import AheadConfig, Binding, MapAhead

SLAB_PAGES = 1000
TICK_S = 0.1


class Device:
    """A swap area that the kernel fills from its beginning; whatever is asked for is mapped."""

    def __init__(self, slabs: int) -> None:
        self.policy = MapAhead(slabs, SLAB_PAGES)
        self.outs = [0] * slabs
        self.bindings = [Binding.UNMAPPED] * slabs
        self.now_s = 0.0
        self.front = 0
        self.late_pages = 0

    def look(self) -> list[int]:
        return self.policy.next(self.now_s, self.outs, self.bindings)

    def map(self) -> list[int]:
        wanted = self.look()
        for slab in wanted:
            assert self.bindings[slab] is Binding.UNMAPPED
            self.bindings[slab] = Binding.EMPTY
        return wanted

    def page_out(self, pages: int) -> None:
        for _ in range(pages):
            slab = self.front // SLAB_PAGES
            self.late_pages += self.bindings[slab] is Binding.UNMAPPED
            self.outs[slab] += 1
            self.bindings[slab] = Binding.OTHER
            self.front += 1
        self.now_s += TICK_S

    def rest(self, seconds: float) -> None:
        self.now_s += seconds

    def go_back(self) -> None:
        self.bindings = [
            Binding.UNMAPPED if binding is Binding.EMPTY else binding for binding in self.bindings
        ]
        self.policy.went_back()

    def empty(self) -> list[int]:
        return [n for n, binding in enumerate(self.bindings) if binding is Binding.EMPTY]


def test_two_slabs_beyond_the_front_are_mapped_however_slow_page_out_is() -> None:
    device = Device(8)
    device.map()
    device.page_out(1)
    assert device.map() == [2]
    for _ in range(50):
        device.page_out(1)
        assert device.map() == []


def test_as_many_as_two_seconds_of_page_out_fill() -> None:
    device = Device(64)
    for _ in range(40):
        device.map()
        device.page_out(300)  # three slabs a second
    device.map()
    assert device.policy.pages_per_s == pytest.approx(3000.0, rel=0.01)
    assert len(device.empty()) == 6
    assert device.late_pages == 0


def test_beyond_the_end_comes_the_beginning() -> None:
    device = Device(4)
    device.bindings = [Binding.UNMAPPED] * 3 + [Binding.OTHER]
    device.outs[3] = 5
    assert device.map() == [0, 1]


def test_no_donor_has_a_free_slab_so_asking_takes_its_time() -> None:
    device = Device(8)
    asked = 0
    for _ in range(100):
        if device.look():
            asked += 1
            device.policy.refused(device.now_s)
        device.rest(TICK_S)
    assert 4 <= asked <= 10
    device.rest(2.0)
    assert device.map() == [0, 1]


def test_a_job_that_does_not_page_out_wants_nothing_after_a_while() -> None:
    device = Device(8)
    assert device.look() == [0, 1]
    device.rest(31.0)
    assert device.look() == []
    device.page_out(1)
    assert device.look() == [1, 2]


def test_what_went_back_untouched_is_not_taken_again_while_the_job_rests() -> None:
    device = Device(8)
    device.page_out(1)
    device.map()
    device.go_back()
    for _ in range(1000):
        device.rest(TICK_S)
        assert device.map() == []
    for _ in range(12):
        device.page_out(10)
        assert device.map() == []
    device.page_out(10)  # an eighth of a slab by now
    assert device.map() == [1, 2]


def test_totals_that_go_down_begin_anew() -> None:
    device = Device(4)
    device.outs = [5000, 0, 0, 0]
    device.look()
    device.rest(1.0)
    device.outs = [10, 0, 0, 0]
    device.look()
    assert device.policy.pages_per_s <= 10.0


def test_one_number_and_one_binding_per_slab() -> None:
    with pytest.raises(ValueError, match="bindings"):
        MapAhead(4, SLAB_PAGES).next(0.0, [0] * 4, [Binding.OTHER] * 3)
    with pytest.raises(ValueError, match="bounds"):
        AheadConfig(slabs_min=-1)


@given(st.lists(st.tuples(st.integers(0, 800), st.booleans()), max_size=60), st.integers(1, 12))
def test_only_unmapped_slabs_are_asked_for_each_once_and_no_more_than_wanted(
    steps: list[tuple[int, bool]], slabs: int
) -> None:
    device = Device(slabs)
    for pages, goes_back in steps:
        wanted = device.map()
        assert len(wanted) == len(set(wanted))
        assert len(wanted) <= device.policy.slabs_wanted <= slabs
        device.page_out(min(pages, slabs * SLAB_PAGES - device.front))
        if goes_back:
            device.go_back()


@given(st.integers(1, 900))
def test_a_steady_page_out_never_meets_a_slab_without_a_donor(pages: int) -> None:
    device = Device(20)
    device.map()
    while device.front + pages < 20 * SLAB_PAGES:
        device.page_out(pages)
        device.map()
    assert device.late_pages == 0
