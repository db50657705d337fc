# SPDX-License-Identifier: Apache-2.0
"""Made-up cgroups of either version, as /proc and /sys/fs/cgroup tell of them.

Processes are process 1 and PID; what is written to a cgroup.procs moves nobody, and is read back.
"""

from __future__ import annotations

from pathlib import Path

PID = 4_999_999
"""That no process has: it is above the highest that a kernel gives."""
HOST_ROOT = "27 1 254:0 / / rw - ext4 /dev/vda rw"
CONTAINER_ROOT = "99 1 0:77 / / rw - overlay overlay rw"


class MadeGroups:
    """One hierarchy of version 2, or several of version 1.

    Args:
        root: an empty directory.
        controllers: of each hierarchy of version 1; empty: version 2.
    """

    def __init__(self, root: Path, *controllers: str) -> None:
        self.proc, self.root = root / "proc", root / "cgroup"
        self.names = controllers or ("",)
        for who in ("1", "self", str(PID)):
            (self.proc / who).mkdir(parents=True)
        for name in self.names:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        if not controllers:
            (self.root / "cgroup.controllers").write_text("cpu memory pids\n")
        self.mounts(HOST_ROOT)
        self.put(1, {})
        self.put(PID, {})

    def mounts(self, own_root: str) -> None:
        """What this process sees mounted at /, and the cgroups."""
        lines = [
            f"{35 + at} 24 0:{32 + at} / {self.root / name} rw - "
            + (f"cgroup none rw,{name}" if name else "cgroup2 none rw")
            for at, name in enumerate(self.names)
        ]
        for who, top in (("1", HOST_ROOT), ("self", own_root), (str(PID), own_root)):
            (self.proc / who / "mountinfo").write_text("\n".join([top, *lines]) + "\n")

    def put(self, pid: int, paths: dict[str, str]) -> None:
        """Has a process in these cgroups, by controller ("" in version 2), and in the top ones."""
        lines = []
        for at, name in enumerate(self.names):
            path = paths.get(name, "/")
            (self.root / name / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
            lines.append(f"{at}:{name}:{path}")
        (self.proc / str(pid) / "cgroup").write_text("\n".join(lines) + "\n")

    def write(self, path: str, **values: object) -> Path:
        """Files of a cgroup; `__` in a name stands for a dot."""
        directory = self.root / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (directory / name.replace("__", ".")).write_text(f"{value}\n")
        return directory

    def memory(self, path: str, limit: int, usage: int, *, kills: int = 0) -> Path:
        """Version 2's figures of a memory cgroup."""
        return self.write(
            path,
            memory__max=limit,
            memory__current=usage,
            memory__stat="anon 1\ninactive_file 0",
            memory__events=f"oom_kill {kills}",
        )

    def status(self, *, anon_mib: int, shared_mib: int = 0, threads: int = 12) -> None:
        """What the process has."""
        (self.proc / str(PID) / "status").write_text(
            f"RssAnon:\t{anon_mib << 10} kB\nRssFile:\t{shared_mib << 10} kB\n"
            f"RssShmem:\t0 kB\nThreads:\t{threads}\n"
        )

    def moved_to(self) -> list[str]:
        """Directories to which a process was moved, below the root."""
        found = self.root.rglob("cgroup.procs")
        return sorted(str(path.parent.relative_to(self.root)) for path in found)
