# SPDX-License-Identifier: Apache-2.0
"""Traces of what jobs touch of their large memory, as tools/bench/c/far/record.c writes them.

A trace is a sequence of records of two words of 32 bits, least significant byte first; trace.h says
what they mean. In this tree traces are compressed with xz.
"""

from __future__ import annotations

import lzma
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).with_name("traces")
SUFFIX: Final = ".trace.xz"
END, WINDOW, TOUCH, TAKEN, MAPPED, FREED, DEAD, ZEROS, LEFT, PART_SIZE, CUT = range(11)
_KIND_SHIFT: Final = 28
_FIRST_MASK: Final = (1 << _KIND_SHIFT) - 1
_RECORD: Final = struct.Struct("<II")
_BATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """Something that happened to pages [first, first + pages).

    Attributes:
        kind: one of the constants above.
        first: number of a page in the agent's arena.
        pages: how many; for a WINDOW, milliseconds since the start.
    """

    kind: int
    first: int
    pages: int

    def holds(self, other: Record) -> bool:
        """Whether the other's pages are among these."""
        return self.first <= other.first and other.first + other.pages <= self.first + self.pages


def recorded(path: Path) -> Iterator[Record]:
    """Yields the records of an uncompressed trace. A recording is a sparse file that ends with
    zeros."""
    with path.open("rb") as file:
        while batch := file.read(_BATCH_BYTES):
            for head, pages in _RECORD.iter_unpack(batch):
                if head >> _KIND_SHIFT == END:
                    return
                yield Record(head >> _KIND_SHIFT, head & _FIRST_MASK, pages)


def shortened(records: Iterable[Record]) -> Iterator[Record]:
    """Drops windows in which nothing happened, and merges touches of consecutive pages.

    A thread that faults in a block which another thread serves faults again. The recorder notes
    both faults; the second is dropped.
    """
    last: Record | None = None
    for record in records:
        if last is not None and last.kind == TOUCH == record.kind:
            if record.first == last.first + last.pages:
                last = Record(TOUCH, last.first, last.pages + record.pages)
                continue
            if last.holds(record):
                continue
        if last is not None and not last.kind == WINDOW == record.kind:
            yield last
        last = record
    if last is not None:
        yield last


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes a compressed trace."""
    with lzma.open(path, "wb", preset=9 | lzma.PRESET_EXTREME) as file:
        for record in records:
            file.write(_RECORD.pack(record.kind << _KIND_SHIFT | record.first, record.pages))


def unpack(path: Path, target: Path) -> None:
    """Decompresses a trace for tools/bench/c/far/replay.c.

    Raises:
        lzma.LZMAError: it is no such file.
    """
    with lzma.open(path, "rb") as packed:
        target.write_bytes(packed.read())


def packed() -> list[Path]:
    """Lists the traces of this tree by name."""
    return sorted(DIRECTORY.glob(f"*{SUFFIX}"))
