# SPDX-License-Identifier: Apache-2.0
"""A donor's root who alters pages in the slabs that the donor lends, while it goes on lending.

Each other page has the CRC-32C of the right one: only a seal tells them apart.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from infiniswap.units import PAGE_BYTES
from support.donors.checksum import with_crc_of

Alteration = Callable[[list[bytes], list[bytes]], list[bytes]]
"""Other pages, made from those in the slabs and those that were there when it was looked first."""


class AlteredSlabs:
    """The pages in slabs of devices, as they lie in the files of a daemon with a fixed port.

    Args:
        run_dir: `daemon.run_dir` of that daemon.
    """

    def __init__(self, run_dir: Path) -> None:
        self._maps: list[mmap.mmap] = []
        for path in sorted(run_dir.glob("*/slabs/slab.*.mapped.*")):
            with path.open("r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0))
        self._places = [
            (memory, at)
            for memory in self._maps
            for at in range(0, len(memory), PAGE_BYTES)
            if any(memory[at : at + PAGE_BYTES])
        ]
        self._first = self.pages

    @property
    def pages(self) -> list[bytes]:
        """Those that were not all zeros at first."""
        return [memory[at : at + PAGE_BYTES] for memory, at in self._places]

    def alter(self, how: Alteration) -> None:
        """Every page."""
        right = self.pages
        self.put(list(map(with_crc_of, how(right, self._first), right)))

    def put(self, pages: list[bytes]) -> None:
        """All of them."""
        for (memory, at), page in zip(self._places, pages, strict=True):
            memory[at : at + PAGE_BYTES] = page

    def close(self) -> None:
        for memory in self._maps:
            memory.close()


def _flipped(pages: list[bytes], first: list[bytes]) -> list[bytes]:
    del first
    return [bytes([page[0] ^ 1]) + page[1:] for page in pages]


def _swapped(pages: list[bytes], first: list[bytes]) -> list[bytes]:
    del first
    return pages[1:] + pages[:1]


def _rolled_back(pages: list[bytes], first: list[bytes]) -> list[bytes]:
    del pages
    return first


ALTERATIONS: Final[dict[str, Alteration]] = {
    "flipped": _flipped,
    "swapped": _swapped,
    "rolled back": _rolled_back,
}
