# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.refill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.refill import Refill

PAGES = 512


class Engine:
    """Copies what was not copied yet, `share` pages at most per call."""

    def __init__(self, share: int = 256) -> None:
        self.share = share
        self.gone: set[int] = set()
        self.copied: list[tuple[int, int]] = []  # slab, page

    def copy(self, slab: int, first: int, pages_max: int) -> tuple[int, int] | None:
        assert 0 <= first < PAGES
        assert pages_max > 0
        if slab in self.gone:
            return None
        known = {page for copied, page in self.copied if copied == slab}
        lacking = [page for page in range(first, PAGES) if page not in known]
        new = lacking[: min(pages_max, self.share)]
        self.copied += [(slab, page) for page in new]
        return len(new), PAGES if new == lacking else new[-1] + 1


def quiet(_slab: int) -> float:
    return 0.0


def test_the_rate_is_kept_and_what_was_not_used_does_not_pile_up() -> None:
    refill, engine = Refill(1000.0, 0.0), Engine()
    assert refill.step(100.0, quiet, engine.copy, PAGES) == 0  # nothing to do for long
    refill.begin(0)
    assert refill.step(100.0, quiet, engine.copy, PAGES) <= 100
    begun = [refill.step(100.0 + tick * 0.05, quiet, engine.copy, PAGES) for tick in range(1, 11)]
    assert sum(begun) == pytest.approx(412, abs=2)  # the rest of the slab


def test_the_busiest_slab_comes_first() -> None:
    refill, engine = Refill(1000.0, 0.0), Engine()
    refill.begin(0)
    refill.begin(1)
    for tick in range(6):  # half of what slab 1 has
        refill.step(tick * 0.1, lambda slab: 5.0 * slab, engine.copy, PAGES)
    assert {slab for slab, _ in engine.copied} == {1}


def test_a_slab_that_lost_its_donor_is_left_and_the_others_go_on() -> None:
    refill, engine = Refill(1e6, 0.0), Engine(PAGES)
    for slab in range(3):
        refill.begin(slab)
    engine.gone = {0}
    refill.step(1.0, quiet, engine.copy, PAGES)
    assert refill.slabs == (1, 2)
    assert {slab for slab, _ in engine.copied} == {1, 2}


def test_an_engine_that_takes_no_more_is_asked_again_later() -> None:
    refill = Refill(1e6, 0.0)
    refill.begin(0)
    calls = []

    def full(slab: int, first: int, pages_max: int) -> tuple[int, int]:
        calls.append(first)
        return 0, first

    for tick in range(5):
        refill.step(tick * 1.0, quiet, full, PAGES)
    assert len(calls) == 4  # the first step has no budget yet
    assert refill.slabs == (0,)


def test_none_is_copied_at_rate_zero() -> None:
    refill = Refill(0.0, 0.0)
    refill.begin(0)
    assert not refill
    with pytest.raises(ValueError, match="rate"):
        Refill(-1.0, 0.0)


def test_a_page_that_reaches_the_backup_late_is_copied_all_the_same() -> None:
    """What was written before its slab had a donor is staged for a while: the first pass cannot
    find it, and nobody would ever ask for it again."""
    refill, engine = Refill(1e6, 0.0), Engine(PAGES)
    staged = set(range(100))

    def copy(slab: int, first: int, pages_max: int) -> tuple[int, int] | None:
        known = {page for _, page in engine.copied} | staged
        new = [page for page in range(first, PAGES) if page not in known][:pages_max]
        engine.copied += [(slab, page) for page in new]
        return len(new), PAGES

    refill.begin(0)
    for tick in range(1, 100):
        refill.step(tick * 0.05, quiet, copy, PAGES)
    assert len(engine.copied) == PAGES - 100
    assert refill.due_s() > 5.0  # nothing to do meanwhile
    staged.clear()
    for tick in range(100, 400):
        refill.step(tick * 0.05, quiet, copy, PAGES)
    assert sorted(page for _, page in engine.copied) == list(range(PAGES))
    assert not refill


def test_a_lower_rate_counts_and_a_higher_one_does_not() -> None:
    refill, engine = Refill(1000.0, 0.0), Engine()
    refill.begin(0)
    assert refill.step(0.1, quiet, engine.copy, PAGES, 0.0) == 0
    assert refill.step(0.2, quiet, engine.copy, PAGES, 100.0) == 10
    assert refill.step(0.3, quiet, engine.copy, PAGES, float("inf")) == pytest.approx(100, abs=1)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 0.5)), max_size=20),
    st.floats(100.0, 1e5),
    st.integers(32, 300),
)
def test_it_always_ends_and_never_exceeds_its_rate(
    events: list[tuple[int, float]], rate: float, share: int
) -> None:
    refill, engine = Refill(rate, 0.0), Engine(share)
    now_s, total = 0.0, 0
    for slab, pause_s in events:
        refill.begin(slab)
        now_s += pause_s
        total += refill.step(now_s, quiet, engine.copy, PAGES)
        assert total <= rate * (now_s + 0.1) + 1
    for _ in range(5 * (PAGES // share + 4) + int(PAGES * 5 / rate / 0.05) + 500):
        if not refill:
            break
        now_s += max(0.05, 1.0 / rate)
        refill.step(now_s, quiet, engine.copy, PAGES)
    assert not refill
    assert len(engine.copied) == PAGES * len({slab for slab, _ in events})
