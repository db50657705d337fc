# SPDX-License-Identifier: Apache-2.0
"""The first pages of a block device, each written and read alone, past the kernel's cache."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any

from infiniswap.units import PAGE_BYTES
from support.devices.cluster import Device, until


class PageByPage:
    """A device of one slab whose first pages are on a donor, in their second version.

    Args:
        device: with a front end that is a block device.
        count: how many pages.

    Attributes:
        pages: their newest contents.
    """

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        self.pages: list[bytes] = []
        self._count = count
        self._memory = mmap.mmap(-1, PAGE_BYTES)

        def are_on_donor() -> bool:
            """A page that is written before its slab is mapped stays on the disk."""
            self.write()
            return int(self.device.status["pages_on_donors"]) == self._count

        until(are_on_donor, "every page on the donor")
        self.write()

    def write(self) -> None:
        """Other contents."""
        self.pages = [os.urandom(PAGE_BYTES) for _ in range(self._count)]
        with self._opened(os.O_WRONLY) as fd:
            for number, page in enumerate(self.pages):
                self._memory[:] = page
                assert os.pwritev(fd, [self._memory], number * PAGE_BYTES) == PAGE_BYTES
            os.fsync(fd)

    def read(self) -> list[bytes | int]:
        """What the kernel gives for each page: its bytes, or the error."""
        with self._opened(os.O_RDONLY) as fd:
            return [self._read(fd, number) for number in range(self._count)]

    def _read(self, fd: int, number: int) -> bytes | int:
        try:
            assert os.preadv(fd, [self._memory], number * PAGE_BYTES) == PAGE_BYTES
        except OSError as error:
            return error.errno or -1
        return bytes(self._memory)

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        fd = os.open(self.device.path, flags | os.O_DIRECT)
        try:
            yield fd
        finally:
            os.close(fd)

    @property
    def donor(self) -> Any:
        """What the status tells of the one donor."""
        (row,) = self.device.status["donors"]
        return row

    @property
    def stats(self) -> dict[str, int]:
        """The counters."""
        stats: dict[str, int] = self.device.status["stats"]
        return stats
