# SPDX-License-Identifier: Apache-2.0
"""zswap's settings, which belong to the whole host: changed for a measurement, and put back by the
run or, when that was killed, by the next one."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from infiniswap.system.files import PROC, SYS, parse_key_values, try_read_text, write_text
from infiniswap.system.interrupts import Interrupts
from infiniswap.system.memory import machine_memory

_BALLOON = Path(__file__).parent / "apps" / "programs" / "balloon.py"
_POOL_SHARE = 0.4
"""Of a job's limit: the pool's bound."""
_POOL_SHARE_MAX = 0.5
PARAMETERS = SYS / "module/zswap/parameters"
NOTE = "zswap.json"
"""In the run's directory: what was set before, and what the run has set."""


def current(names: Mapping[str, str], parameters: Path = PARAMETERS) -> dict[str, str]:
    """Today's values of these settings."""
    return {name: (try_read_text(parameters / name) or "").strip() for name in names}


def restore(work: Path, parameters: Path = PARAMETERS) -> None:
    """Puts back what the run's note tells. A value that somebody else has set since stays.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    text = try_read_text(work / NOTE)
    if text is None:
        return
    note = json.loads(text)
    now = current(note["before"], parameters)
    for name, value in note["before"].items():
        if now[name] == note["ours"][name] != value:
            write_text(parameters / name, value, "cannot put back zswap's settings")
    (work / NOTE).unlink()


def is_there(parameters: Path = PARAMETERS) -> bool:
    """Whether the kernel has it."""
    return (parameters / "enabled").exists()


@contextlib.contextmanager
def settings(
    work: Path,
    interrupts: Interrupts,
    wanted: Mapping[str, str],
    parameters: Path = PARAMETERS,
) -> Iterator[None]:
    """zswap with these settings.

    Args:
        work: the run's directory.
        interrupts: to hold signals with.
        wanted: by name.
        parameters: directory of the kernel's settings.

    Raises:
        NotPermittedError, SystemCallError: the kernel's refusal.
    """
    note, new = work / NOTE, work / f"{NOTE}.new"
    try:
        with interrupts.hold():
            before = current(wanted, parameters)
            new.write_text(json.dumps({"before": before, "ours": dict(wanted)}))
            new.replace(note)
            for name, value in wanted.items():
                write_text(parameters / name, value, "cannot set zswap")
        yield
    finally:
        with interrupts.hold():
            restore(work, parameters)


def bounded(limit_bytes: int) -> dict[str, str] | None:
    """Settings with which it is on, and its pool takes a part of this limit at the most; pages that
    were not used for longest then go to the swap area. None: the kernel has no zswap, or its
    smallest pool, 1 % of the machine's memory, is too much."""
    percent = pool_percent(limit_bytes, machine_memory().total_bytes)
    if percent is None or not is_there():
        return None
    return {"max_pool_percent": str(percent), "enabled": "Y"}


def pool_percent(limit_bytes: int, memory_bytes: int) -> int | None:
    """Of so much memory, for a job with that limit; None: no whole number will do."""
    percent = max(1, int(100 * limit_bytes * _POOL_SHARE / memory_bytes))
    return percent if percent * memory_bytes <= 100 * limit_bytes * _POOL_SHARE_MAX else None


def limit_bytes_min() -> int:
    """The least limit for which `bounded` has settings."""
    return int(machine_memory().total_bytes / 100 / _POOL_SHARE)


def balloon(limit_bytes: int) -> list[str]:
    """The command that makes the pool count, in a cgroup of version 1."""
    meminfo = PROC / "meminfo"
    return [sys.executable, "-I", str(_BALLOON), "zswap", str(meminfo), str(limit_bytes)]


def pool_bytes() -> int:
    """Memory that holds compressed pages now, of the whole host."""
    text = try_read_text(PROC / "meminfo") or ""
    values = parse_key_values(text.replace(":", " ").replace(" kB", ""))
    return values.get("Zswap", 0) * 1024
