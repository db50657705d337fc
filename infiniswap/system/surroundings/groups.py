# SPDX-License-Identifier: Apache-2.0
"""The cgroups that a process is in: whose they are, and whether they are frozen."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final

from infiniswap.errors import InfiniswapError
from infiniswap.system.files import PROC, parse_key_values, try_read_text
from infiniswap.system.memory import Hierarchy, chain, hierarchies, parse_process_cgroups
from infiniswap.system.mounts import parse_mountinfo

_SESSIONS: Final = "user.slice"
_INIT: Final = "init.scope"


def groups_of(pid: int, *, proc: Path = PROC) -> tuple[Hierarchy, ...]:
    """Every hierarchy with the process's own cgroup; none where that cannot be read."""
    try:
        return hierarchies(proc=proc, pid=pid)
    except InfiniswapError:
        return ()


def homes(*, proc: Path = PROC) -> dict[Path, Path]:
    """Where services belong, by mount point: the cgroups of process 1, which are the root groups of
    a host and a container's own ones in a container. None where process 1 is another system's."""
    if _is_apart(proc):
        return {}
    return {
        hierarchy.mount_point: hierarchy.mount_point
        if hierarchy.own == hierarchy.mount_point / _INIT
        else hierarchy.own
        for hierarchy in groups_of(1, proc=proc)
    }


def _is_apart(proc: Path) -> bool:
    """Whether process 1 has another root file system, as that of the host has in a container which
    shares the host's pids. Also where that cannot be known."""
    roots = []
    for who in ("1", "self"):
        text = try_read_text(proc / who / "mountinfo")
        if text is None:
            return True
        found = [mount for mount in parse_mountinfo(text) if mount.mount_point == "/"]
        roots.append((found[-1].device, found[-1].root) if found else None)
    # None: a chroot, which is no system of its own.
    return None not in roots and roots[0] != roots[1]


def _unit_path(pid: int, proc: Path) -> PurePosixPath | None:
    """The cgroup of the systemd unit whose very own one the process is in; None where that is a
    session's, or lies deeper: a unit's child groups are those of its jobs."""
    paths = parse_process_cgroups(try_read_text(proc / str(pid) / "cgroup") or "")
    path = PurePosixPath(paths.get("name=systemd", paths.get("", "/")))
    if path.suffix == ".service":
        return None if path.name.startswith("user@") else path
    # Sessions, and the terminals of a desktop, are scopes below user.slice.
    return path if path.suffix == ".scope" and _SESSIONS not in path.parts else None


def is_in_unit(pid: int, *, proc: Path = PROC) -> bool:
    """Whether the process is in the cgroup of a service, or of a scope outside of sessions."""
    return _unit_path(pid, proc) is not None


def foreign_groups(pid: int, *, proc: Path = PROC) -> tuple[tuple[Hierarchy, Path], ...]:
    """The process's cgroups that are neither its unit's or container's own nor where services
    belong, each with the one where a service belongs."""
    unit, known = _unit_path(pid, proc), homes(proc=proc)
    found = []
    for hierarchy in groups_of(pid, proc=proc):
        home = known.get(hierarchy.mount_point, hierarchy.own)
        path = PurePosixPath("/") / hierarchy.own.relative_to(hierarchy.mount_point)
        # Version 1: a controller that its unit has no use for knows only a group above the unit's.
        if hierarchy.own != home and not (unit and (path == unit or path in unit.parents)):
            found.append((hierarchy, home))
    return tuple(found)


def frozen_by(pid: int, *, proc: Path = PROC) -> tuple[str, str]:
    """What keeps a process from running: a sentence's end and the remedy, both empty if nothing."""
    for hierarchy in groups_of(pid, proc=proc):
        for path in chain(hierarchy):
            if hierarchy.version == 2:
                is_frozen = (try_read_text(path / "cgroup.freeze") or "").strip() == "1"
                events = parse_key_values(try_read_text(path / "cgroup.events") or "")
                is_frozen = is_frozen and events.get("frozen", 1) == 1
                mend = f"echo 0 > {path}/cgroup.freeze"
            else:
                is_frozen = (try_read_text(path / "freezer.self_freezing") or "").strip() == "1"
                mend = f"echo THAWED > {path}/freezer.state"
            if is_frozen:
                return f"its cgroup {path} is frozen", (
                    "Thaw it where it was frozen (docker unpause, systemctl thaw, the batch "
                    f"system), or by hand: {mend}."
                )
    stat = try_read_text(proc / str(pid) / "stat") or ""
    if stat[stat.rfind(")") + 1 :].split()[:1] in (["T"], ["t"]):
        return "it is stopped by a signal or a debugger", f"Run: kill -CONT {pid}."
    return "", ""
