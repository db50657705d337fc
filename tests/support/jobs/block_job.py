# SPDX-License-Identifier: Apache-2.0
"""A process that goes through its memory block by block, and through each block in no order.

Run as a script: python block_job.py MIB. Each line of its standard input is one walk; it answers
with a line of JSON: the walk's major faults, and the pages whose bytes were wrong.
"""

from __future__ import annotations

import json
import mmap
import random
import resource
import sys

_BLOCK_PAGES = 512


def main(mib: int) -> None:
    memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    pages = len(memory) // mmap.PAGESIZE
    for page in range(pages):
        at = page * mmap.PAGESIZE
        memory[at : at + 8] = page.to_bytes(8, "little")
    order = random.Random(1).sample(range(_BLOCK_PAGES), _BLOCK_PAGES)
    print("ready", flush=True)
    for _ in sys.stdin:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        wrong = 0
        for first in range(0, pages, _BLOCK_PAGES):
            for page in (first + n for n in order):
                at = page * mmap.PAGESIZE
                wrong += int.from_bytes(memory[at : at + 8], "little") != page
        after = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        print(json.dumps({"faults": after - before, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
