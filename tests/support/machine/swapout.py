# SPDX-License-Identifier: Apache-2.0
"""Pushing somebody's memory out to the swap area, page by page."""

from __future__ import annotations

import mmap
from pathlib import Path

_MADV_PAGEOUT = 21


def swap_out_file(path: Path) -> int:
    """Asks the kernel to swap a file in memory (tmpfs, memfd) out, see madvise(2).

    Returns:
        How many bytes of it are on a swap area then; pages that somebody has locked are not.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        pages.read()  # only mapped pages are asked for
        pages.madvise(_MADV_PAGEOUT)
        is_ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            fields = line.split()
            if "-" in fields[0]:
                is_ours = fields[4] == str(path.stat().st_ino)
            elif is_ours and fields[0] == "Swap:":
                return int(fields[1]) * 1024
    raise AssertionError(f"{path} is not mapped")
