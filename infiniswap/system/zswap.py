# SPDX-License-Identifier: Apache-2.0
"""zswap: a pool of compressed pages in this host's memory, which the kernel fills before it writes
to any swap area. What it is set to, what it has done, and when it pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.system.files import PROC, SYS, parse_key_values, try_read_int, try_read_text
from infiniswap.system.memory import parse_meminfo
from infiniswap.units import MIB, PAGE_BYTES

_PARAMETERS: Final = Path("module/zswap/parameters")
_POOL_PERCENT_DEFAULT: Final = 20

HELPS_SHARE_MAX: Final = 0.5
"""Of its size, to which a page may shrink at the most if zswap is to help a job whose limit counts
the pool, too: it helped at 44 % and did harm at 55 % (docs/benchmarks.md, "zswap in front")."""
HELD_BYTES_MIN: Final = 16 * MIB
"""What the pool must hold before the share to which pages shrink means anything."""


@dataclass(frozen=True, slots=True)
class Zswap:
    """Of one cgroup or of the whole host, bytes. Pages count as they are when not compressed.

    Attributes:
        stored_bytes: pages that it has taken so far.
        loaded_bytes: pages that it has given back.
        written_bytes: pages that it has passed on to swap areas; None: not counted, as before
            Linux 6.8.
        held_bytes: pages in the pool now.
        pool_bytes: memory that these take.
    """

    stored_bytes: int
    loaded_bytes: int
    written_bytes: int | None
    held_bytes: int
    pool_bytes: int

    @property
    def shrunk_share(self) -> float | None:
        """To how much of their size the pages in the pool have shrunk; None: too few to tell."""
        if self.held_bytes < HELD_BYTES_MIN:
            return None
        return self.pool_bytes / self.held_bytes


def is_on(*, sys: Path = SYS) -> bool:
    """Whether it takes pages now."""
    text = try_read_text(sys / _PARAMETERS / "enabled") or "N"
    return text.strip() in ("Y", "1")


def pool_percent_max(*, sys: Path = SYS) -> int:
    """How much of the host's memory the pool may take."""
    percent = try_read_int(sys / _PARAMETERS / "max_pool_percent")
    return _POOL_PERCENT_DEFAULT if percent is None else percent


def switch(*, sys: Path = SYS) -> Path:
    """The file that switches it on and off."""
    return sys / _PARAMETERS / "enabled"


def of_host(*, proc: Path = PROC) -> Zswap | None:
    """What it does for every program of this host; None where the kernel does not count."""
    counters = parse_key_values(try_read_text(proc / "vmstat") or "")
    memory = parse_meminfo(try_read_text(proc / "meminfo") or "")
    return _zswap(counters, memory.get("Zswapped", 0), memory.get("Zswap", 0))


def of_cgroup(path: Path) -> Zswap | None:
    """What it does for a cgroup of version 2; None where the kernel does not count."""
    stat = parse_key_values(try_read_text(path / "memory.stat") or "")
    return _zswap(stat, stat.get("zswapped", 0), stat.get("zswap", 0))


def _zswap(counters: Mapping[str, int], held_bytes: int, pool_bytes: int) -> Zswap | None:
    if "zswpin" not in counters or "zswpout" not in counters:  # Linux 5.19
        return None
    written = counters.get("zswpwb")
    return Zswap(
        stored_bytes=counters["zswpout"] * PAGE_BYTES,
        loaded_bytes=counters["zswpin"] * PAGE_BYTES,
        written_bytes=None if written is None else written * PAGE_BYTES,
        held_bytes=held_bytes,
        pool_bytes=pool_bytes,
    )


def keeps_pages_at(cgroups: Iterable[Path], *, sys: Path = SYS) -> Path | None:
    """Which file of these cgroups forbids that their pages go to a swap area (Linux 6.8, version
    2): zswap takes a page, or it stays in memory. None: no such file, or zswap is off."""
    if not is_on(sys=sys):
        return None
    files = (path / "memory.zswap.writeback" for path in cgroups)
    return next((file for file in files if try_read_int(file) == 0), None)
