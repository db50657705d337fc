# SPDX-License-Identifier: Apache-2.0
"""`python -m infiniswap.demo.probe DEVICE REPORT`: how fast is a block device really?

Random 4 KiB reads, then writes of zeros, each for a moment, from several threads. The kernel's
limits work in slices of a tenth of a second, with some credit at first; so the first part of each
is not counted.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_THREADS = 8
_BLOCK_BYTES = 4096
_WARM_S = 0.3
_MEASURED_S = 0.7


def _rate(path: str, size_bytes: int, write: bool) -> float:
    counts = [0] * _THREADS
    stop = threading.Event()

    def work(index: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        rng = random.Random(index)
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # page aligned, as direct I/O needs it
            step: Callable[[int], int]
            if write:
                step = lambda offset: os.pwritev(descriptor, [block], offset)  # noqa: E731
            else:
                step = lambda offset: os.preadv(descriptor, [block], offset)  # noqa: E731
            while not stop.is_set():
                step(rng.randrange(size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
                counts[index] += 1
        os.close(descriptor)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(_THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(_WARM_S)
    before, start_s = sum(counts), time.monotonic()
    time.sleep(_MEASURED_S)
    rate = (sum(counts) - before) / (time.monotonic() - start_s)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


def main() -> None:
    """Measures and reports."""
    device, report = sys.argv[1:3]
    descriptor = os.open(device, os.O_RDONLY)
    size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
    os.close(descriptor)
    rates = {
        "reads_per_s": _rate(device, size_bytes, write=False),
        "writes_per_s": _rate(device, size_bytes, write=True),
    }
    Path(report).write_text(json.dumps(rates), encoding="ascii")


if __name__ == "__main__":
    main()
