# SPDX-License-Identifier: Apache-2.0
"""How much of the page cache a host is using.

MemAvailable counts page cache as free, which it is unless its pages are read again. A host that
re-reads a data set gets slower when the pool squeezes these pages out. The kernel notices that: a
refault is a page read from disk that was in the cache a short while ago. So while pages refault,
the whole cache counts as used, and so do the refaulted bytes, because a sufficient cache would have
been larger by these. When refaults stop, the cache counts in full for a while, then less and less.
"""

from __future__ import annotations

from dataclasses import dataclass

from infiniswap.units import MIB


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """When cache counts as used.

    Attributes:
        refault_bytes_per_s: rate of refaults above which it does.
        hold_s: how long the cache counts in full after the last such second.
        half_s: after that, the time in which the amount that counts halves.
    """

    refault_bytes_per_s: float = 1.0 * MIB
    hold_s: float = 60.0
    half_s: float = 30.0


class CacheUse:
    """Follows the refaults of one host or cgroup.

    Args:
        config: parameters.
    """

    def __init__(self, config: CacheConfig | None = None) -> None:
        self._config = config or CacheConfig()
        self._seen: tuple[float, int] | None = None
        self._peak_bytes = 0.0
        self._refaulted_s = float("-inf")
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """File cache that must not count as available; 0 while nothing refaults."""
        return self._used_bytes

    def observe(self, now_s: float, refault_bytes: int, file_bytes: int) -> int:
        """Takes the kernel's counters; returns `used_bytes`.

        Args:
            now_s: seconds of the clock used throughout.
            refault_bytes: file pages that refaulted since the start, in bytes. A number that went
                down starts a new count.
            file_bytes: file cache that could be dropped, now.
        """
        before, self._seen = self._seen, (now_s, refault_bytes)
        if before is None or now_s <= before[0]:
            return self._used_bytes
        refaulted = max(0, refault_bytes - before[1])
        if refaulted > self._config.refault_bytes_per_s * (now_s - before[0]):
            self._refaulted_s = now_s
            self._peak_bytes = float(file_bytes + refaulted)
        rested_s = now_s - self._refaulted_s - self._config.hold_s
        if rested_s > 0.0:
            left = self._peak_bytes * 0.5 ** (rested_s / self._config.half_s)
            self._used_bytes = int(left) if left >= MIB else 0
        else:
            self._used_bytes = int(max(self._peak_bytes, 0.0))
        # Pages that are not cached take no memory; those that refaulted in this second will.
        self._used_bytes = min(self._used_bytes, file_bytes + refaulted)
        return self._used_bytes
