# SPDX-License-Identifier: Apache-2.0
"""A host's job that reads the same file again and again.

    python -m isw_bench.faults.reader FILE SECONDS SLICE_S

After a line it reads the file once and prints "cached"; after another it prints "running NS"
(CLOCK_MONOTONIC), reads for that long, and prints the blocks it got in every slice, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

BLOCK_BYTES = 256 << 10


def main(argv: list[str]) -> None:
    """Does it."""
    descriptor = os.open(argv[1], os.O_RDONLY)
    seconds, slice_s = float(argv[2]), float(argv[3])
    size_bytes = os.fstat(descriptor).st_size
    buffer = bytearray(BLOCK_BYTES)
    sys.stdin.readline()
    for offset in range(0, size_bytes, BLOCK_BYTES):
        os.preadv(descriptor, [buffer], offset)
    print("cached", flush=True)
    sys.stdin.readline()
    ops = [0] * round(seconds / slice_s)
    start_ns, offset = time.monotonic_ns(), 0
    print(f"running {start_ns}", flush=True)
    now_ns = start_ns
    while (place := int((now_ns - start_ns) / 1e9 / slice_s)) < len(ops):
        os.preadv(descriptor, [buffer], offset)
        offset = (offset + BLOCK_BYTES) % size_bytes
        ops[place] += 1
        now_ns = time.monotonic_ns()
    print(json.dumps({"ops": ops}), flush=True)


if __name__ == "__main__":
    main(sys.argv)
