# SPDX-License-Identifier: Apache-2.0
"""What the kernel has logged since a moment: the one place where it says who ran out of memory."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/kmsg")
_RECORD_BYTES_MAX: Final = 8192
_RECORDS_MAX: Final = 10_000


class KernelLog:
    """Records from its creation on. Where this process may not read them there are none.

    Args:
        device: the kernel's log, a record for each read.
    """

    def __init__(self, device: Path = DEVICE) -> None:
        self._fd = -1
        try:
            self._fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()

    def says(self, words: str, wait_s: float) -> bool:
        """Whether a record that was not read yet begins with these words, or comes in that time."""
        end_s = time.monotonic() + wait_s
        while self._fd >= 0:
            if any(text.startswith(words) for text in self._records()):
                return True
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                return False
        return False

    def _records(self) -> Iterator[str]:
        for _ in range(_RECORDS_MAX):
            try:
                data = os.read(self._fd, _RECORD_BYTES_MAX)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the oldest ones were overwritten
                    continue
                if error.errno != errno.EAGAIN:
                    self.close()
                return
            if not data:
                return
            # Priority, number, time and flags; then the text.
            yield data.partition(b";")[2].decode(errors="replace")

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
