# SPDX-License-Identifier: Apache-2.0
"""What root finds in another process's memory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from infiniswap.units import MIB

_CHUNK_BYTES = 4 * MIB


def memory_has(pid: int, marker: bytes, *, of_a_core: bool = False) -> bool:
    """Whether a process has it in memory that can be written to: a donor, with its slabs.

    Args:
        of_a_core: only what a core file with every kind of mapping holds.
    """
    smaps = Path(f"/proc/{pid}/smaps").read_text()
    areas = [
        (first, last)
        for first, last, flags in re.findall(
            r"^(\w+)-(\w+) rw.*\n(?:\w+:.*\n)*?VmFlags:(.*)", smaps, re.MULTILINE
        )
        if not (of_a_core and "dd" in flags.split())
    ]
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for first, last in areas:
            at, end = int(first, 16), int(last, 16)
            while at < end:
                length = min(_CHUNK_BYTES, end - at)
                with contextlib.suppress(OSError):  # of a device, or of a key
                    if marker in os.pread(memory.fileno(), length, at):
                        return True
                at += length
    return False
