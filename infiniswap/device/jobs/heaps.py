# SPDX-License-Identifier: Apache-2.0
"""Programs whose memory is set by an option, or else by the memory limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.system.files import PROC


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that takes as much memory as an option says.

    Attributes:
        options: beginnings of the words, or of the settings of the environment, that set it.
        variable: of the environment, that may hold these words; "" if there is none.
        example: what to type where the memory limit sets it; "" if that never does.
        least_share: of the limit, what the program uses at least when its heap is full.
        full_exit: exit code of a program whose heap was full; 0 if that code says nothing.
    """

    options: tuple[str, ...]
    variable: str = ""
    example: str = ""
    least_share: float = 0.0
    full_exit: int = 0


_PROGRAMS: Final = {
    "node": _Program(
        ("--max-old-space-size", "--max_old_space_size"),
        "NODE_OPTIONS",
        "NODE_OPTIONS=--max-old-space-size=4096 (MiB)",
        0.5,
        128 + signal.SIGABRT,
    ),
    "java": _Program(
        ("-Xmx", "-XX:MaxHeapSize", "-XX:MaxRAM"),
        "JAVA_TOOL_OPTIONS",
        "JAVA_TOOL_OPTIONS=-Xmx4g",
        0.2,
    ),
    "dotnet": _Program(
        ("DOTNET_GCHeapHardLimit", "COMPlus_GCHeapHardLimit"),
        "",
        "DOTNET_GCHeapHardLimit=0x100000000 (bytes, as a hexadecimal number)",
        0.5,
        128 + signal.SIGABRT,
    ),
    "sort": _Program(("-S", "--buffer-size")),
}
"""By the name of the executable. Of a limit of 300 MiB the heap of Node.js 20 takes 86 %, that of
OpenJDK 17 42 %, and a quarter of larger limits. That of .NET takes 75 %, as its documentation says;
this was not measured."""

_PAGED_MAX: Final = 0.5
"""A job without a telling exit code that paged out more than this share of the limit was not held
back by its heap. Node.js has memory beside the heap and pages it out before the heap is full: 58
MiB with a limit of 200 MiB, and more than half of one of 128 MiB."""


class MemoryOptions:
    """Looks for such programs among a job's processes.

    Args:
        proc: root of the proc file system.

    Attributes:
        given: options that set how much memory a program takes, as "sort -S".
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._seen: dict[int, str] = {}
        self._by_limit: set[str] = set()
        self.given: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Looks at each program that a process has become, once."""
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
                name = os.path.basename(os.readlink(self._proc / str(pid) / "exe"))
                if self._seen.get(pid) != name:
                    self._seen[pid] = name
                    self._note(pid, name)

    def _note(self, pid: int, name: str) -> None:
        program = _PROGRAMS.get(name)
        if program is None:
            return
        option = self._given(pid, program)
        if option:
            self.given.add(f"{name} {option}")
        elif program.example:
            self._by_limit.add(name)

    def _given(self, pid: int, program: _Program) -> str:
        """The option that the program was started with; "" without one."""
        words = self._words(pid, "cmdline")
        for setting in self._words(pid, "environ"):
            words.append(setting)
            variable, _, value = setting.partition("=")
            if program.variable and variable == program.variable:
                words += re.split(r"\s+", value)
        found = (each for each in program.options for word in words if word.startswith(each))
        return next(found, "")

    def _words(self, pid: int, name: str) -> list[str]:
        return os.fsdecode((self._proc / str(pid) / name).read_bytes()).split("\0")

    def full(self, exit_code: int, peak_bytes: int, paged_bytes: int, limit_bytes: int) -> str:
        """The runtime whose heap was full by the limit; "" if there is none.

        Args:
            exit_code: of the job, which failed.
            peak_bytes: the most memory that the job used.
            paged_bytes: the most of it that was paged out.
            limit_bytes: of its memory.
        """
        little_paged = paged_bytes <= _PAGED_MAX * limit_bytes
        held = (
            name
            for name in sorted(self._by_limit)
            if peak_bytes >= _PROGRAMS[name].least_share * limit_bytes
            and (little_paged or exit_code == _PROGRAMS[name].full_exit)
        )
        return next(held, "")


def describe(runtime: str) -> str:
    """Why a job failed whose heap was full, and what to type."""
    return (
        f"{runtime} sizes its heap by the memory limit, so it fails instead of paging out. Set the "
        f"size of the heap yourself, for example: {_PROGRAMS[runtime].example}"
    )
