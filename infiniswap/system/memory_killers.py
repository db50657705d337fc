# SPDX-License-Identifier: Apache-2.0
"""Programs that end others when memory is short, before the kernel does: earlyoom, systemd-oomd and
their like."""

from __future__ import annotations

import configparser
import getopt
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.system.files import PROC, try_read_text

EARLYOOM: Final = "earlyoom"
SYSTEMD_OOMD: Final = "systemd-oomd"
_NAMES: Final = (EARLYOOM, SYSTEMD_OOMD, "oomd", "nohang", "bustd")

_EARLYOOM_SHARE: Final = 0.10
_EARLYOOM_OPTIONS: Final = "m:s:M:S:kinN:dvr:phg"
_EARLYOOM_LONG: Final = ("prefer=", "avoid=", "ignore=", "dryrun", "ignore-root-user")
_OOMD_SHARE: Final = 0.90
_OOMD_DIRECTORIES: Final = ("usr/lib/systemd", "usr/local/lib/systemd", "run/systemd")


@dataclass(frozen=True, slots=True)
class MemoryKiller:
    """One that runs, whose threshold is known.

    Attributes:
        name: of the program.
        pid: of its process.
        available_bytes: it acts when less than this is available.
        setting: where that is set.
    """

    name: str
    pid: int
    available_bytes: int
    setting: str


def memory_killers(
    total_bytes: int, *, proc: Path = PROC, root: Path = Path("/")
) -> Iterator[MemoryKiller]:
    """Finds those that run on this host. If it has swap space, each also waits until little of that
    is free.

    Args:
        total_bytes: MemTotal.
        proc: root of the proc file system.
        root: where systemd's configuration is.
    """
    for directory in sorted(proc.glob("[0-9]*")):
        name = (try_read_text(directory / "comm") or "").strip()
        pid = int(directory.name)
        if name == EARLYOOM:
            words = (try_read_text(directory / "cmdline") or "").split("\0")[1:-1]
            yield MemoryKiller(name, pid, _of_earlyoom(words, total_bytes), "options -m and -M")
        elif name == SYSTEMD_OOMD:
            share = 1.0 - _oomd_share(root)
            yield MemoryKiller(name, pid, int(share * total_bytes), "SwapUsedLimit= in oomd.conf")


def _of_earlyoom(words: list[str], total_bytes: int) -> int:
    try:
        options, _ = getopt.gnu_getopt(words, _EARLYOOM_OPTIONS, _EARLYOOM_LONG)
    except getopt.GetoptError:
        options = []
    given, found = dict(options), []
    for option, unit_bytes in (("-m", total_bytes / 100.0), ("-M", 1024.0)):
        try:
            found.append(int(float(given[option].partition(",")[0]) * unit_bytes))
        except (KeyError, ValueError):
            continue
    return min(found, default=int(_EARLYOOM_SHARE * total_bytes))  # the lower one counts


def _oomd_share(root: Path) -> float:
    """Share of memory, and of swap space, that has to be used before it acts."""
    files: dict[str, Path] = {}
    for directory in (*_OOMD_DIRECTORIES, "etc/systemd"):  # a later file of a name replaces it
        files |= {path.name: path for path in (root / directory).glob("oomd.conf.d/*.conf")}
    text = [*(root / "etc/systemd" / "oomd.conf",), *(files[name] for name in sorted(files))]
    parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    for path in text:
        try:
            parser.read_string(try_read_text(path) or "")
        except configparser.Error:
            continue
    value = parser.get("OOM", "SwapUsedLimit", fallback="") or ""
    number, unit = value.strip()[:-1], value.strip()[-1:]
    try:
        return min(1.0, float(number) / {"%": 100.0, "‰": 1000.0, "‱": 10000.0}[unit])
    except (KeyError, ValueError):
        return _OOMD_SHARE


def is_memory_killers(sender: int, *, proc: Path = PROC) -> bool:
    """Whether a signal for this process, from the process with that pid, came from one of them.

    A service manager (the first process, the parent, or one outside of this container: 0) is none.
    Where other users' processes are hidden (ProtectProc=), whoever else sends one and still runs
    counts as one of them.
    """
    if sender in (0, 1, os.getppid()):
        return False
    name = try_read_text(proc / str(sender) / "comm")
    if name is not None:
        return name.strip() in _NAMES
    try:
        os.kill(sender, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False
