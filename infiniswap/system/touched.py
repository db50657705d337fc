# SPDX-License-Identifier: Apache-2.0
"""Which memory processes use: the kernel's "referenced" bits, cleared and read again.

The kernel's own reclaim reads these bits, too: right after they were cleared it takes all pages of
the process for equally idle.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import from_oserror
from infiniswap.system.files import PROC, try_read_text

_KIB: Final = 1024
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_READS: Final = ("0", "63")
"""Numbers of read(2): of x86-64, and of arm64 and RISC-V."""
_UTIME: Final = 11  # after the name, in /proc/PID/stat: proc(5) counts from 1, and has 14


@dataclass(frozen=True, slots=True)
class Touched:
    """Memory of processes; a page that several of them have counts in parts.

    Attributes:
        resident_bytes: in RAM.
        referenced_bytes: of these, used since the bits were cleared.
        swapped_bytes: swapped out.
    """

    resident_bytes: int = 0
    referenced_bytes: int = 0
    swapped_bytes: int = 0


def clear(pids: Iterable[int], *, proc: Path = PROC) -> None:
    """Clears the bits; processes that have ended are left out.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    for pid in pids:
        path = proc / str(pid) / "clear_refs"
        try:
            with path.open("w") as file:
                file.write("1")
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:
            raise from_oserror("cannot clear the referenced bits", error, where=str(path)) from None


def touched(pids: Iterable[int], *, proc: Path = PROC) -> Touched:
    """Sums over processes; those that have ended, or may not be looked at, are left out."""
    resident = referenced = swapped = 0
    for pid in pids:
        values = rollup(pid, proc=proc)
        rss, pss = values.get("Rss", 0), values.get("Pss", 0)
        resident += pss
        if rss:
            referenced += values.get("Referenced", 0) * pss // rss
        swapped += values.get("SwapPss", 0)
    return Touched(resident, referenced, swapped)


def rollup(pid: int, *, proc: Path = PROC) -> dict[str, int]:
    """Memory of one process in bytes, by the names in /proc/PID/smaps_rollup; empty where there is
    no such process or it may not be looked at."""
    values = {}
    for line in (try_read_text(proc / str(pid) / "smaps_rollup") or "").splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[1].isdecimal():
            values[fields[0].rstrip(":")] = int(fields[1]) * _KIB
    return values


class UserTime:
    """Processor time in user mode of a job whose processes come and go.

    Args:
        proc: root of the proc file system.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._by_pid: dict[tuple[int, str], float] = {}

    def add(self, pids: Iterable[int]) -> float:
        """Looks at the processes; returns seconds of all seen so far."""
        for pid in pids:
            text = try_read_text(self._proc / str(pid) / "stat") or ""
            fields = text.rpartition(")")[2].split()
            if len(fields) > 19:  # the start time tells a process from a later one of its number
                self._by_pid[pid, fields[19]] = int(fields[_UTIME]) * _TICK_S
        return sum(self._by_pid.values())


def reads_terminal(pids: Iterable[int], *, proc: Path = PROC) -> bool:
    """Whether one of the processes waits in read(2) for a terminal."""
    for pid in pids:
        words = (try_read_text(proc / str(pid) / "syscall") or "").split()
        if len(words) > 1 and words[0] in _READS:
            with contextlib.suppress(OSError, ValueError):
                path = os.readlink(proc / str(pid) / "fd" / str(int(words[1], 16)))
                if path.startswith(("/dev/tty", "/dev/pts/")):
                    return True
    return False
