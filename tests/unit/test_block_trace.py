# SPDX-License-Identifier: Apache-2.0
"""In what order a trace takes what the rings of several processors hold."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from infiniswap.errors import UnavailableError
from infiniswap.system import block_trace, perf_ring
from infiniswap.system.block_trace import DISCARD, WRITE, BlockTrace, _Event, _Layout
from infiniswap.units import PAGE_BYTES

LAYOUT = _Layout(number=1, sector_at=0, sectors_at=8, flags_at=12, flags_bytes=4)


def sample(at_ns: int, flags: bytes) -> bytes:
    """The first page of a device."""
    told = struct.pack("<QI4s", 0, 8, flags)
    return struct.pack("<IHHQI", 9, 0, 20 + len(told), at_ns, len(told)) + told


class Ring:
    """Of a processor: what is found in it, each time."""

    def __init__(self, *found: list[bytes]) -> None:
        self._found = list(found)

    def take(self) -> Iterator[bytes]:
        """The next ones."""
        yield from self._found.pop(0) if self._found else []

    def close(self) -> None:
        """Nothing."""


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> BlockTrace:
    monkeypatch.setattr(block_trace, "_layout", lambda: LAYOUT)
    return BlockTrace(0)


def told(trace: BlockTrace, *rings: Any) -> list[int]:
    """Kinds of what the trace tells of two drains, and of its end."""
    trace._rings = list(rings)
    trace._drain()
    trace._drain()
    trace._reader.start()
    trace.__exit__()
    return list(trace.events().kinds)


def test_a_ring_that_was_read_may_get_something_earlier(trace: BlockTrace) -> None:
    assert told(trace, Ring([], [sample(5, b"W")]), Ring([sample(6, b"D")])) == [WRITE, DISCARD]


def test_the_first_ring_does_not_come_first(trace: BlockTrace) -> None:
    assert told(trace, Ring([sample(6, b"D")]), Ring([sample(5, b"WS")])) == [WRITE, DISCARD]


def test_a_discard_of_what_was_never_written_says_nothing(trace: BlockTrace) -> None:
    assert told(trace, Ring([sample(5, b"D"), sample(6, b"W")])) == [WRITE]


def test_rings_of_kernels_with_larger_pages_are_not_read() -> None:
    perf_ring.check_machine("cannot look", PAGE_BYTES)
    with pytest.raises(UnavailableError, match="65536"):
        perf_ring.check_machine("cannot look", 65536)


def test_a_flush_is_no_request_for_pages() -> None:
    assert LAYOUT.event_in(sample(5, b"F")) == []
    assert LAYOUT.event_in(sample(5, b"R")) == [_Event(5, block_trace.READ, range(1))]
