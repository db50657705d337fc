# SPDX-License-Identifier: Apache-2.0
"""Which pages of a block device are read, written and discarded: the kernel's tracepoint
block:block_bio_queue.

Of very many events those of every second, fourth, ... block of pages are kept, and stand for all
(Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from infiniswap.errors import InfiniswapError, UnavailableError
from infiniswap.system import perf_ring
from infiniswap.system.perf_ring import PerfEvent, PerfRing
from infiniswap.system.programs import run_command
from infiniswap.units import MIB, PAGE_BYTES

READ: Final = 0
WRITE: Final = 1
DISCARD: Final = 2

_EVENT: Final = "/sys/kernel/tracing/events/block/block_bio_queue"
_TELL: Final = (
    f"test -e {_EVENT}/format || mount -t tracefs nodev /sys/kernel/tracing; cat {_EVENT}/format"
)
"""In a mount namespace of its own, which ends with the command."""

_CANNOT: Final = "cannot trace the swap device"
_TIME: Final = struct.Struct("<Q")
_COUNT: Final = struct.Struct("<I")
_RAW_AT: Final = 20
"""In a sample: header, time, length of what the tracepoint tells."""

_EVENTS_MAX: Final = 30_000
"""Each takes 2 µs of processor time, beside a job that pages in within 8 µs."""
_BLOCK_PAGES: Final = 16
_BLOCKS_MIN: Final = 16
"""Fewer do not stand for all."""

_RINGS_BYTES: Final = 64 * MIB
"""Of all processors together."""
_DRAIN_S: Final = 0.05
_SECTOR_BYTES: Final = 512
_PAGE_SECTORS: Final = PAGE_BYTES // _SECTOR_BYTES


@dataclass(frozen=True, slots=True)
class PageEvents:
    """What happened to pages, in order.

    Attributes:
        at_ns: when, by CLOCK_MONOTONIC.
        kinds: READ, WRITE or DISCARD.
        pages: their numbers on the device.
        every: of so many blocks of pages these are those of one.
        lost: how many requests the kernel could not tell.
    """

    at_ns: array[int]
    kinds: array[int]
    pages: array[int]
    every: int
    lost: int


class _Event(NamedTuple):
    """A request."""

    at_ns: int
    kind: int
    pages: range


@dataclass(frozen=True, slots=True)
class _Layout:
    """Of the tracepoint: its number, and where its fields are."""

    number: int
    sector_at: int
    sectors_at: int
    flags_at: int
    flags_bytes: int

    def event_in(self, record: bytes) -> list[_Event]:
        """What a sample tells; nothing of a flush."""
        at = _RAW_AT
        flags = record[at + self.flags_at : at + self.flags_at + self.flags_bytes]
        flags = flags.partition(b"\0")[0]
        kind = DISCARD if b"D" in flags else READ if b"R" in flags else WRITE
        if kind == WRITE and b"W" not in flags:
            return []
        at_ns: int = _TIME.unpack_from(record, perf_ring.HEADER.size)[0]
        sector: int = _TIME.unpack_from(record, at + self.sector_at)[0]
        sectors: int = _COUNT.unpack_from(record, at + self.sectors_at)[0]
        last = -(-(sector + sectors) // _PAGE_SECTORS)
        return [_Event(at_ns, kind, range(sector // _PAGE_SECTORS, last))]


class BlockTrace:
    """Of one device, while the `with` statement lasts.

    Args:
        device: its number, as st_rdev has it.

    Raises:
        UnavailableError: this kernel has no such tracepoint, or this processor is unknown.
        NotPermittedError, SystemCallError: the kernel's refusal.
    """

    def __init__(self, device: int) -> None:
        self._layout = _layout()
        self._device = os.major(device) << 20 | os.minor(device)
        self._rings: list[PerfRing] = []
        self._lost = 0
        self._every = 1
        self._events_max = _EVENTS_MAX
        self._found: list[tuple[int, int, int]] = []
        self._written: set[int] = set()
        self._waiting: list[_Event] = []
        self._drained_ns = 0
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, name="block-trace", daemon=True)

    def __enter__(self) -> Self:
        self._rings = self._open()
        for ring in self._rings:
            ring.start()
        # A signal must not come to the reader: whoever runs a job waits for signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._reader.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._reader.join()
        self._drain()
        self._keep(self._waiting)
        for ring in self._rings:
            ring.close()
        self._rings.clear()

    def events(self) -> PageEvents:
        """All of them; once the trace has ended."""
        found = PageEvents(array("Q"), array("B"), array("Q"), self._every, self._lost)
        for at_ns, kind, page in sorted(self._found):
            found.at_ns.append(at_ns)
            found.kinds.append(kind)
            found.pages.append(page)
        return found

    def _open(self) -> list[PerfRing]:
        """One for each processor, with the filter of now."""
        each_bytes = _RINGS_BYTES // len(perf_ring.online()) // self._every  # fewer events
        ring_bytes = max(MIB, 1 << each_bytes.bit_length() - 1)
        tells = perf_ring.TELLS_RAW | perf_ring.TELLS_TIME
        event = PerfEvent(
            _CANNOT, perf_ring.TRACEPOINT, self._layout.number, tells, filter=self._filter()
        )
        return perf_ring.open_rings(lambda processor: PerfRing(event, processor, ring_bytes))

    def _read(self) -> None:
        while not self._over.wait(_DRAIN_S):
            every = self._every
            self._drain()
            if self._every > every:
                with contextlib.suppress(InfiniswapError):  # it goes on with more events
                    self._reopen()

    def _reopen(self) -> None:
        """With another filter: the kernel takes one for each ring, and once. What comes between
        the stop of a ring and the start of the next is lost, which is a few events at most."""
        rings = self._open()
        for old in self._rings:
            old.stop()
        for new in rings:
            new.start()
        for old in self._rings:
            self._take(old)
            old.close()
        self._rings = rings

    def _drain(self) -> None:
        """Takes what is in the rings. What came since the last time waits for the next one: a ring
        that has been read already may get something earlier meanwhile."""
        now_ns = time.monotonic_ns()
        for ring in self._rings:
            self._take(ring)
        self._waiting.sort(key=lambda event: event.at_ns)
        ripe = bisect_left(self._waiting, self._drained_ns, key=lambda event: event.at_ns)
        self._keep(self._waiting[:ripe])
        del self._waiting[:ripe]
        self._drained_ns = now_ns

    def _take(self, ring: PerfRing) -> None:
        for record in ring.take():
            kind, _, _ = perf_ring.HEADER.unpack_from(record)
            if kind == perf_ring.SAMPLE:
                self._waiting += self._layout.event_in(record)
            elif kind == perf_ring.LOST:
                self._lost += _TIME.unpack_from(record, 16)[0]

    def _keep(self, events: Sequence[_Event]) -> None:
        """Of each the pages that are to be told; in order."""
        for at_ns, kind, pages in events:
            if kind == DISCARD:  # of a whole device, perhaps
                known = self._written if len(self._written) < len(pages) else pages
                gone = [page for page in known if page in pages and page in self._written]
                self._written.difference_update(gone)
                self._found += [(at_ns, kind, page) for page in gone]
                continue
            kept = [page for page in pages if self._is_kept(page)]
            self._found += [(at_ns, kind, page) for page in kept]
            if kind == WRITE:
                self._written.update(kept)
            while len(self._found) > self._events_max:
                self._halve()

    def _halve(self) -> None:
        if len({page // _BLOCK_PAGES for _, _, page in self._found}) < 2 * _BLOCKS_MIN:
            self._events_max *= 2
            return
        self._every *= 2
        self._found = [event for event in self._found if self._is_kept(event[2])]
        self._written = {page for page in self._written if self._is_kept(page)}

    def _filter(self) -> str:
        """For the kernel: what cannot be left out by its first sector."""
        block_sectors = _BLOCK_PAGES * _PAGE_SECTORS
        others = f'nr_sector > {block_sectors} || rwbs ~ "*D*"'
        kept = f"!(sector & {(self._every - 1) * block_sectors})"
        return f"dev == {self._device}" + (f" && ({others} || {kept})" if self._every > 1 else "")

    def _is_kept(self, page: int) -> bool:
        return page // _BLOCK_PAGES % self._every == 0


def _layout() -> _Layout:
    perf_ring.check_machine(_CANNOT)
    text = run_command(["unshare", "--mount", "sh", "-c", _TELL])
    number = re.search(r"^ID: (\d+)", text, re.MULTILINE)
    places = {
        name: (int(at), int(size))
        for name, at, size in re.findall(
            r"field:[^;]*?\b(\w+)(?:\[\d+\])?;\s*offset:(\d+);\s*size:(\d+);", text
        )
    }
    if number is None or not {"sector", "nr_sector", "rwbs"} <= places.keys():
        raise UnavailableError("this kernel does not tell what block devices do")
    return _Layout(int(number[1]), places["sector"][0], places["nr_sector"][0], *places["rwbs"])
