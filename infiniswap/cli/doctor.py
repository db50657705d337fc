# SPDX-License-Identifier: Apache-2.0
"""`infiniswap doctor`: what this host can do, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from infiniswap import config as configuration
from infiniswap.errors import InfiniswapError
from infiniswap.system.files import try_read_text
from infiniswap.units import MIB, format_size_short

OK: Final = "ok"
WARN: Final = "degraded"
MISSING: Final = "missing"

_CAP_SYS_RESOURCE = 24
_CAP_SYS_ADMIN = 21


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: short and stable, for programs.
        state: "ok", "degraded" (works, with less) or "missing" (that part cannot be used).
        what: what was found.
        mend: a command or step; empty when there is nothing to mend.
    """

    name: str
    state: str
    what: str
    mend: str = ""


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this host can do, and what is missing",
        description="Looks at this host and says what works, what does not, and how to mend it. "
        "Changes nothing. Exit code 0 when a job can be run here, 5 when not.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument("--donors", metavar="H[:P],...", help="donors to ask")
    parser.add_argument("--secret-file", metavar="FILE", help="the cluster secret")


def run(args: argparse.Namespace) -> int:
    """Prints the findings."""
    overrides = {"cluster.peers": args.donors, "cluster.secret_file": args.secret_file}
    config = configuration.load(args.config, overrides)
    findings = list(examine(config))
    if args.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        print()
    else:
        _print(findings)
    return 5 if any(f.state == MISSING and f.name in _NEEDED for f in findings) else 0


_NEEDED: Final = frozenset({"root", "library", "fuse", "loop", "memory-cgroup", "backup"})
"""What `infiniswap run` cannot do without."""


def examine(config: configuration.Config) -> Iterator[Finding]:
    """Every finding, in the order of the report. A check that fails is a finding itself."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("host", _host),
        ("root", _root),
        ("library", _library),
        ("kernel", _front_ends),
        ("memory-cgroup", _memory_cgroup),
        ("swap-safety", _swap_safety),
        ("swap", _swap_areas),
        ("backup", lambda: _backup(config)),
        ("donors", lambda: _donors(config)),
        ("devices", lambda: _devices(config)),
    )
    for name, check in checks:
        try:
            yield from check()
        except InfiniswapError as error:
            yield Finding(name, MISSING, error.what, error.mend)
        except OSError as error:
            yield Finding(name, WARN, f"could not be looked at: {error}")


def _host() -> Iterator[Finding]:
    from infiniswap.system.memory import host_memory

    memory = host_memory()
    yield Finding(
        "host",
        OK,
        f"Linux {platform.release()}, {os.cpu_count()} processors, "
        f"{format_size_short(memory.available_bytes)} of {format_size_short(memory.total_bytes)} "
        f"available (limited by {memory.limited_by})",
    )


def _root() -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield Finding("root", OK, "running as root")
    else:
        yield Finding(
            "root",
            MISSING,
            "not root: devices, swap and memory limits cannot be set up",
            "sudo infiniswap doctor",
        )


def _library() -> Iterator[Finding]:
    try:
        from infiniswap.engine.native import library_features
    except ImportError as error:
        yield Finding("library", MISSING, f"the C library is not built ({error})", "make setup")
        return
    built = library_features()
    yield Finding("library", OK, "the C library is built")
    for name, package in (("fuse", "libfuse3-dev"), ("uring", "liburing-dev")):
        if name not in built:
            yield Finding(
                f"build-{name}",
                MISSING if name == "fuse" else WARN,
                f"this build has no {name}",
                f"apt install {package}, then build again",
            )


def _front_ends() -> Iterator[Finding]:
    for name, path, module in (
        ("fuse", "/dev/fuse", "fuse"),
        ("loop", "/dev/loop-control", "loop"),
    ):
        if Path(path).exists():
            yield Finding(name, OK, f"{path} is there")
        else:
            yield Finding(name, MISSING, f"{path} is missing", f"modprobe {module}")
    for name, path in (("ublk", "/dev/ublk-control"), ("nbd", "/sys/block/nbd0")):
        there = Path(path).exists()
        yield Finding(
            name,
            WARN,
            f"the kernel {'has' if there else 'does not show'} {name} ({path}), which this "
            "release does not use yet",
        )


def _memory_cgroup() -> Iterator[Finding]:
    from infiniswap.system.memory import memory_hierarchy

    hierarchy = memory_hierarchy()
    yield Finding("memory-cgroup", OK, f"version {hierarchy.version} at {hierarchy.mount_point}")
    own = hierarchy.own
    if hierarchy.version == 1 and not (own / "memory.memsw.usage_in_bytes").exists():
        yield Finding(
            "swap-accounting",
            WARN,
            "the kernel does not account swap to cgroups; peaks are reported without it",
            "boot with swapaccount=1",
        )


def _capabilities() -> int:
    for line in (try_read_text(Path("/proc/self/status")) or "").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _swap_safety() -> Iterator[Finding]:
    capabilities = _capabilities()
    if capabilities >> _CAP_SYS_RESOURCE & 1:
        yield Finding("cap-sys-resource", OK, "threads can be I/O flushers, oom score can be set")
    else:
        yield Finding(
            "cap-sys-resource",
            WARN,
            "no CAP_SYS_RESOURCE: page-path threads cannot be marked as I/O flushers and the "
            "device process can be killed when memory runs out",
            "run as root outside of restricted containers (docker: --cap-add SYS_RESOURCE)",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or hard == resource.RLIM_INFINITY:
        yield Finding("memory-lock", OK, "memory can be locked")
    elif hard < 256 * MIB:
        yield Finding(
            "memory-lock",
            WARN,
            f"at most {format_size_short(hard)} can be locked (now {format_size_short(soft)})",
            "raise memlock in /etc/security/limits.conf, or run as root",
        )


def _swap_areas() -> Iterator[Finding]:
    from infiniswap.system.swap import active_areas

    areas = active_areas()
    if not areas:
        yield Finding("swap", OK, "no other swap area is active")
    for area in areas:
        top = area.priority >= 32_767
        yield Finding(
            "swap",
            WARN if top else OK,
            f"{area.path}: priority {area.priority}, {format_size_short(area.used_bytes)} in use"
            + ("; nothing can come before it" if top else ""),
            f"swapoff {area.path}; swapon -p 10 {area.path}" if top else "",
        )


def _backup(config: configuration.Config) -> Iterator[Finding]:
    from infiniswap.system.backup import check_backup

    directory = config.device.backup_dir
    existing = directory
    while not existing.exists():
        existing = existing.parent
    check_backup(existing / ".infiniswap-doctor.backup", MIB)
    free_bytes = os.statvfs(existing).f_bavail * os.statvfs(existing).f_frsize
    yield Finding("backup", OK, f"{directory}: {format_size_short(free_bytes)} free")


def _donors(config: configuration.Config) -> Iterator[Finding]:
    from infiniswap.cli.status import ask

    if not config.cluster.peers:
        yield Finding(
            "donors", WARN, "none is configured", "--donors HOST, or `peers` under [cluster]"
        )
        return
    for row in asyncio.run(ask(config.cluster.peers, config.secret(), config.cluster.ask_s)):
        if row.status is None:
            yield Finding("donors", WARN, f"{row.address}: {row.error}")
            continue
        lendable_bytes = row.status.pool.can_map * row.status.slab_bytes
        same = row.status.slab_bytes == config.device.slab_bytes
        yield Finding(
            "donors",
            OK if same else WARN,
            f"{row.address} ({row.status.donor_name}): can lend {format_size_short(lendable_bytes)}"
            + ("" if same else f", in slabs of {format_size_short(row.status.slab_bytes)}"),
            "" if same else "set the same slab size on both (--slab)",
        )
        if row.status.pool.slabs_unpinned:
            yield Finding(
                "donors", WARN, f"{row.address}: some of its slabs are not locked in memory"
            )


def _devices(config: configuration.Config) -> Iterator[Finding]:
    from infiniswap.device.listing import local_devices

    for row in local_devices(config.device.run_dir, config.device.backup_dir):
        alarms = row.get("alarms")
        yield Finding(
            "devices",
            WARN if alarms else OK,
            f"{row['name']}: {row['state']}" + (f": {alarms}" if alarms else ""),
        )


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {OK: "green", WARN: "yellow", MISSING: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.what)
        if finding.mend:
            text.append(f"\n  mend: {finding.mend}", style="italic")
        table.add_row(finding.name, Text(finding.state, style=styles[finding.state]), text)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
