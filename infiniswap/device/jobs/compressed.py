# SPDX-License-Identifier: Apache-2.0
"""What zswap, which the kernel asks before any swap area, does for a job.

On cgroup version 2 the kernel counts that for the job alone, and counts the pool in the job's
limit. On version 1 there are the figures of the whole host only, and the pool lies outside every
limit. Both are counted from the job's start, so it does not matter when zswap is switched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infiniswap.documents import page
from infiniswap.system import zswap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.files import PROC
from infiniswap.system.zswap import Zswap
from infiniswap.units import format_size_short


@dataclass(frozen=True, slots=True)
class ZswapUse:
    """While a job ran. Pages count as they are when not compressed.

    Attributes:
        whose: "job", or "host" where the kernel counts all programs together.
        stored_bytes: pages that zswap took.
        loaded_bytes: pages that it gave back: page-ins that no device has seen.
        written_bytes: pages that it passed on to swap areas; None: the kernel does not count them.
        pool_peak_bytes: memory of the pool at the most, as far as seen.
        shrunk_share: to how much of their size the pages had shrunk then; None: too few to tell.
    """

    whose: str
    stored_bytes: int
    loaded_bytes: int
    written_bytes: int | None
    pool_peak_bytes: int
    shrunk_share: float | None


class Meter:
    """Follows zswap from now on.

    Args:
        cgroup: of the job.
        proc: root of the proc file system.
    """

    def __init__(self, cgroup: MemoryCgroup, *, proc: Path = PROC) -> None:
        self._cgroup = cgroup
        self._proc = proc
        self._before = self._last = self._fullest = self._read()

    def sample(self) -> None:
        """Takes the figures of now; keeps the last ones where they cannot be read."""
        now = self._read()
        if now is None:
            return
        self._last = now
        if self._fullest is None or now.pool_bytes > self._fullest.pool_bytes:
            self._fullest = now

    def use(self) -> ZswapUse | None:
        """None where zswap did nothing, or the kernel does not tell."""
        before, last, fullest = self._before, self._last, self._fullest
        if before is None or last is None or fullest is None:
            return None
        stored_bytes = last.stored_bytes - before.stored_bytes
        loaded_bytes = last.loaded_bytes - before.loaded_bytes
        if not stored_bytes and not loaded_bytes:
            return None
        written_bytes = None
        if last.written_bytes is not None and before.written_bytes is not None:
            written_bytes = last.written_bytes - before.written_bytes
        return ZswapUse(
            whose="job" if self._cgroup.version == 2 else "host",
            stored_bytes=stored_bytes,
            loaded_bytes=loaded_bytes,
            written_bytes=written_bytes,
            pool_peak_bytes=fullest.pool_bytes,
            shrunk_share=fullest.shrunk_share,
        )

    def _read(self) -> Zswap | None:
        if self._cgroup.version == 2:
            return zswap.of_cgroup(self._cgroup.path)
        return zswap.of_host(proc=self._proc)


def describe(use: ZswapUse) -> str:
    """A part of a closing line."""
    whose = "" if use.whose == "job" else " (for all programs of this host)"
    return (
        f"zswap{whose} took {format_size_short(use.stored_bytes)}, gave back "
        f"{format_size_short(use.loaded_bytes)}"
    )


def harm(use: ZswapUse) -> str:
    """Advice where pages shrink too little to be worth the memory of the pool; else nothing."""
    if use.shrunk_share is None or use.shrunk_share <= zswap.HELPS_SHARE_MAX:
        return ""
    if use.whose == "job":
        what = "make a job slower with zswap"
    else:
        what = "take memory that would help a job more as --local"
    return (
        f"zswap shrank pages to {use.shrunk_share:.0%} only. Pages that shrink so little {what}. "
        f"To switch it off: echo N > /sys/module/zswap/parameters/enabled "
        f"({page('when-to-use.md')})"
    )
