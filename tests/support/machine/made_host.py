# SPDX-License-Identifier: Apache-2.0
"""A made-up host of 16 GiB with memory cgroups of either version, as /proc and their files tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NO_LIMIT_V1 = 9_223_372_036_854_771_712
_CPUS = "sys/devices/system/cpu"


def make_files(root: Path, files: Mapping[str, object]) -> Path:
    """Texts of a line or more, by their path below a directory, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def make_idle(root: Path, driver: str, *states: tuple[str, int], flags: str = "fpu") -> None:
    """What a /proc and a /sys below it tell of idle processors; states: names and µs to wake up."""
    cpus = {"current_driver": driver, "current_governor_ro": "menu"}
    make_files(root / _CPUS / "cpuidle", cpus)
    make_files(root, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}"})
    for number, (name, latency_us) in enumerate(states):
        state = root / f"{_CPUS}/cpu0/cpuidle/state{number}"
        make_files(state, {"name": name, "latency": latency_us})


class MadeHost:
    """A /proc and a cgroup mount under one directory."""

    def __init__(self, root: Path, *, version: int, own: str, mount_root: str = "/") -> None:
        self.proc, self.top, self.version = root / "proc", root / "cgroup", version
        (self.proc / "self").mkdir(parents=True)
        self.top.mkdir()
        (self.proc / "meminfo").write_text(
            "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n"
            "MemAvailable:    8388608 kB\nHugePages_Total:       0\n"
        )
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        line = f"35 24 0:32 {mount_root} {self.top} rw - {kind} none {options}\n"
        (self.proc / "self" / "mountinfo").write_text(line)
        text = f"0::{own}\n" if version == 2 else f"5:cpu:/other\n4:memory:{own}\n0::/\n"
        (self.proc / "self" / "cgroup").write_text(text)
        if version == 2:
            (self.top / "cgroup.controllers").write_text("cpu memory\n")

    def cgroup(self, path: str, *, limit: int | None = None, usage: int = 0, file: int = 0) -> Path:
        directory = self.top / path
        directory.mkdir(parents=True, exist_ok=True)
        if self.version == 2:
            (directory / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
            (directory / "memory.current").write_text(f"{usage}\n")
            (directory / "memory.stat").write_text(f"anon 7\nfile 1\ninactive_file {file}\n")
            (directory / "memory.events").write_text("oom 3\noom_kill 2\n")
            (directory / "memory.swap.current").write_text("11\n")
        else:
            shown = NO_LIMIT_V1 if limit is None else limit
            (directory / "memory.limit_in_bytes").write_text(f"{shown}\n")
            (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
            (directory / "memory.max_usage_in_bytes").write_text(f"{usage + 1}\n")
            (directory / "memory.stat").write_text(
                f"inactive_file 99\ntotal_rss 7\ntotal_inactive_file {file}\ntotal_swap 11\n"
            )
            (directory / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
        return directory
