# SPDX-License-Identifier: Apache-2.0
"""A program that reads one page after the other, and reports the pauses and errors it sees."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from pathlib import Path

from infiniswap.units import PAGE_BYTES


class Reader:
    """A thread that reads pages of a block device at random, past the page cache.

    Attributes:
        reads: how many were answered.
        longest_s: the longest time for which a read was waited for, since `forget`.
        error: of the first read that failed, None without one; it is the last read.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.reads = 0
        self.longest_s = 0.0
        self.error: OSError | None = None
        self._ended = threading.Event()
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._pages = size_bytes // PAGE_BYTES
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Pauses before now do not count."""
        self.longest_s = 0.0

    def close(self) -> None:
        """Ends it."""
        self._ended.set()
        self._thread.join(60.0)
        os.close(self._file)

    def _read(self) -> None:
        buffer = mmap.mmap(-1, PAGE_BYTES)
        rng = random.Random(1)
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                os.preadv(self._file, [buffer], rng.randrange(self._pages) * PAGE_BYTES)
            except OSError as error:
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                self.error = error
                return
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            self.reads += 1
