# SPDX-License-Identifier: Apache-2.0
"""A process that runs on every processor once and then stays on one, with memory to page out.

Run as a script: python hopping_job.py PART_BYTES PARTS. Each line of its standard input has it page
one more part out; it answers with a line, and keeps running meanwhile, as a working job does.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time

_HOP_S = 0.05
_MADV_PAGEOUT = 21


def work(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def main(part_bytes: int, parts: int) -> None:
    memory = mmap.mmap(-1, part_bytes * parts, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for place in range(0, len(memory), mmap.PAGESIZE):
        memory[place] = 1
    first, *others = sorted(os.sched_getaffinity(0))
    for processor in (*others, first):
        os.sched_setaffinity(0, {processor})
        work(time.monotonic() + _HOP_S)
    print("ready", flush=True)
    for part in range(parts):
        while not select.select([sys.stdin], [], [], 0)[0]:
            work(time.monotonic() + 0.001)
        if not sys.stdin.readline():
            return
        memory.madvise(_MADV_PAGEOUT, part * part_bytes, part_bytes)
        print("done", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
