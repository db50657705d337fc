# SPDX-License-Identifier: Apache-2.0
"""Traces of `make bench` victims: what is kept of a recording, and the file it is kept in."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from isw_bench.far import record
from isw_bench.far.traces import (
    CUT,
    FREED,
    LEFT,
    MAPPED,
    PART_SIZE,
    TOUCH,
    WINDOW,
    Record,
    recorded,
    shortened,
    unpack,
    write,
)

from infiniswap.errors import SystemCallError

RECORDS = [
    Record(PART_SIZE, 0, 16),
    Record(MAPPED, 512, 1024),
    Record(WINDOW, 0, 40),
    Record(TOUCH, 512, 32),
    Record(FREED, 512, 16),
    Record(TOUCH, 512, 16),
]


def test_touches_that_follow_each_other_are_one() -> None:
    touches = [Record(TOUCH, first, 16) for first in (0, 16, 32, 64)]
    assert list(shortened(touches)) == [Record(TOUCH, 0, 48), Record(TOUCH, 64, 16)]


def test_a_fault_that_is_tried_again_is_dropped() -> None:
    touches = [Record(TOUCH, first, 16) for first in (0, 16, 16, 0, 32)]
    assert list(shortened(touches)) == [Record(TOUCH, 0, 48)]


def test_touches_on_both_sides_of_a_window_are_two() -> None:
    records = [Record(TOUCH, 0, 16), Record(WINDOW, 0, 40), Record(TOUCH, 16, 16)]
    assert list(shortened(records)) == records


def test_of_windows_without_a_record_the_last_is_kept() -> None:
    windows = [Record(WINDOW, 0, ms) for ms in (40, 80, 120)]
    touch = Record(TOUCH, 0, 16)
    assert list(shortened([*windows, touch])) == [windows[-1], touch]


def test_a_trace_is_unpacked_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "a.trace.xz", RECORDS)
    unpack(tmp_path / "a.trace.xz", tmp_path / "a.trace")
    assert list(recorded(tmp_path / "a.trace")) == RECORDS


def test_a_recording_ends_with_its_first_empty_record(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<6I", TOUCH << 28 | 7, 1, 0, 0, TOUCH << 28, 1))
    assert list(recorded(tmp_path / "a")) == [Record(TOUCH, 7, 1)]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "touched large memory"),
        ([Record(TOUCH, 0, 16), Record(CUT, 0, 0)], "not all of it was recorded"),
        ([Record(TOUCH, 0, 160), Record(LEFT, 0, 16)], "after a fork"),
    ],
)
def test_a_trace_that_says_too_little_is_refused(more: list[Record], why: str) -> None:
    with pytest.raises(SystemCallError, match=why):
        record.checked([Record(PART_SIZE, 0, 16), *more])


def test_a_trace_of_which_the_kernel_took_little_is_kept() -> None:
    records = [Record(TOUCH, 0, 1600), Record(LEFT, 0, 32)]
    assert record.checked(records) == records
