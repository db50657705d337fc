# SPDX-License-Identifier: Apache-2.0
"""Where processor time goes while a cell runs: device, donors, threads of the kernel.

The job's own time is what its launcher was told when it ended; all else is summed up from samples,
because these processes and threads go on living, or vanish without a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infiniswap.system.files import PROC, parse_key_values, try_read_text
from infiniswap.units import PAGE_BYTES

_KTHREADD = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KINDS = (
    ("kswapd", re.compile(r"kswapd\d")),
    ("loop", re.compile(r"loop\d|kworker/.*[-+]loop\d")),
    ("softirq", re.compile(r"ksoftirqd/")),
    ("kworker", re.compile(r"kworker/")),
)
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """Of /proc/PID/stat.

    Attributes:
        name: of the program or thread.
        parent: its pid.
        busy_s: processor time so far, user and system.
        started: ticks since boot; with the pid it names a process for good.
    """

    name: str
    parent: int
    busy_s: float
    started: int


def parse_stat(text: str) -> ProcessTimes | None:
    """From the text of /proc/PID/stat; None when it is none."""
    head, _, tail = text.rpartition(")")  # a name may hold blanks and brackets
    fields = tail.split()
    try:
        busy_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return ProcessTimes(head.partition("(")[2], int(fields[1]), busy_s, int(fields[19]))
    except (IndexError, ValueError):
        return None


def kernel_kind(name: str) -> str:
    """What a kernel thread of this name is counted as."""
    return next((kind for kind, pattern in _KINDS if pattern.match(name)), _OTHER)


class BusyTimes:
    """Adds up what processes do between the first sample and the last.

    Args:
        kind_of: what a process is counted as; None: it is not counted.
        proc: root of the proc file system.
    """

    def __init__(
        self, kind_of: Callable[[int, ProcessTimes], str | None], *, proc: Path = PROC
    ) -> None:
        self._kind_of = kind_of
        self._proc = proc
        self._first: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], tuple[str, float]] = {}
        self._begun = False

    def sample(self) -> None:
        """Looks at every process there is."""
        self._look_at(_numbers(self._proc))
        self._begun = True

    def sample_known(self) -> None:
        """Looks at those that are counted: quick, as one that ends takes its last figures along."""
        self._look_at(sorted({pid for pid, _ in self._last}))

    def _look_at(self, pids: Iterable[int]) -> None:
        for entry in pids:
            found = parse_stat(try_read_text(self._proc / str(entry) / "stat") or "")
            if found is None:
                continue
            key = (entry, found.started)
            known = self._last.get(key)
            kind = known[0] if known else self._kind_of(entry, found)
            if kind is not None:
                # One that comes up later has done nothing before.
                self._first.setdefault(key, 0.0 if self._begun else found.busy_s)
                self._last[key] = (kind, found.busy_s)

    def totals(self) -> dict[str, float]:
        """Seconds by kind."""
        found: dict[str, float] = {}
        for key, (kind, busy_s) in self._last.items():
            found[kind] = found.get(kind, 0.0) + busy_s - self._first[key]
        return {kind: round(busy_s, 3) for kind, busy_s in sorted(found.items())}


def _numbers(proc: Path) -> Iterable[int]:
    return sorted(int(name) for name in os.listdir(proc) if name.isdecimal())


def kernel_thread_kind(pid: int, times: ProcessTimes) -> str | None:
    """For BusyTimes: the threads of the kernel."""
    return kernel_kind(times.name) if times.parent == _KTHREADD else None


# ---------------------------------------------------------------------------- memory


def resident_bytes(pids: Iterable[int], *, proc: Path = PROC) -> int:
    """Memory of these processes; what they share counts once."""
    total = 0
    for pid in pids:
        text = try_read_text(proc / str(pid) / "smaps_rollup") or ""
        match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += int(match[1]) * 1024 if match else 0
    return total


@dataclass(frozen=True, slots=True)
class Paged:
    """What the whole host has swapped so far, in bytes. `pool`: of what came in, what zswap had in
    its pool, and did not have to be read from the area."""

    in_bytes: int
    out_bytes: int
    pool_in_bytes: int

    def since(self, before: Paged) -> Paged:
        """What came after."""
        return Paged(
            self.in_bytes - before.in_bytes,
            self.out_bytes - before.out_bytes,
            self.pool_in_bytes - before.pool_in_bytes,
        )


def paged(*, proc: Path = PROC) -> Paged:
    """Of now, from /proc/vmstat; zeros where the kernel does not count."""
    return parse_vmstat(parse_key_values(try_read_text(proc / "vmstat") or ""))


def parse_vmstat(values: Mapping[str, int]) -> Paged:
    """From the counters of /proc/vmstat. The kernel counts a page that zswap serves in `zswpin`
    alone."""
    from_area, from_pool = values.get("pswpin", 0), values.get("zswpin", 0)
    return Paged(
        (from_area + from_pool) * PAGE_BYTES,
        (values.get("pswpout", 0) + values.get("zswpout", 0)) * PAGE_BYTES,
        from_pool * PAGE_BYTES,
    )
