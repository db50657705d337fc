# SPDX-License-Identifier: Apache-2.0
"""`python balloon.py zram MM_STAT LIMIT` or `balloon.py zswap MEMINFO LIMIT`: holds as much locked
memory as that pool of compressed pages takes, up to LIMIT bytes.

It runs in the job's cgroup, to which this kernel does not charge the pool; so the pool counts
against the job's limit as soon as it grows. (Lowering the limit instead would not do: on cgroup
version 1 that waits until the job no longer allocates.)
"""

import contextlib
import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

PAGE_BYTES = 4096
STEP_BYTES = 64 * PAGE_BYTES
PAUSE_S = 0.002
MADV_NOHUGEPAGE = 15


def zram_bytes(text: str) -> int:
    """From mm_stat: mem_used_total."""
    return int(text.split()[2])


def zswap_bytes(text: str) -> int:
    """From /proc/meminfo."""
    line = next(line for line in text.splitlines() if line.startswith("Zswap:"))
    return int(line.split()[1]) * 1024


def own_bytes() -> int:
    """What this process takes by itself."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def main(kind: str, path: str, limit_bytes: int) -> None:
    """Follows the pool until it is ended."""
    with contextlib.suppress(OSError):  # where root may not: if the kernel kills this, it is seen
        Path("/proc/self/oom_score_adj").write_text("-1000", encoding="ascii")
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, limit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(MADV_NOHUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    read = {"zram": zram_bytes, "zswap": zswap_bytes}[kind]
    self_bytes, held = own_bytes(), 0
    with open(path, encoding="ascii") as file:
        while True:
            file.seek(0)
            wanted = min(limit_bytes, max(0, read(file.read()) - self_bytes))
            wanted = wanted // PAGE_BYTES * PAGE_BYTES
            if wanted >= held + STEP_BYTES:
                if libc.mlock(ctypes.c_void_p(start + held), ctypes.c_size_t(wanted - held)):
                    sys.exit(f"cannot lock memory: {os.strerror(ctypes.get_errno())}")
                held = wanted
            elif wanted <= held - STEP_BYTES:
                libc.munlock(ctypes.c_void_p(start + wanted), ctypes.c_size_t(held - wanted))
                memory.madvise(mmap.MADV_DONTNEED, wanted, held - wanted)
                held = wanted
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
