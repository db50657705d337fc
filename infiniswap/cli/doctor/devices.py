# SPDX-License-Identifier: Apache-2.0
"""Findings about this host's devices: their backup, what they say, and what killed ones left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap.cli.doctor.finding import Finding, degraded, good
from infiniswap.config import Config
from infiniswap.demo import leftovers as demo_leftovers
from infiniswap.device.cleanup import leftovers
from infiniswap.device.control.listing import local_devices
from infiniswap.device.spec import rundir
from infiniswap.donor import home as homes
from infiniswap.errors import InfiniswapError
from infiniswap.remedies import REMEDIES
from infiniswap.system import service_units
from infiniswap.system.backup import check_backup
from infiniswap.system.files import is_held
from infiniswap.system.surroundings.in_force import NAME as STARTER
from infiniswap.units import MIB, format_size_short

_FREE_SHARE_MIN: Final = 0.05


def backup(config: Config) -> Iterator[Finding]:
    """Where devices keep their local copy."""
    directory = config.device.backup_dir
    existing = directory
    while not existing.exists():
        existing = existing.parent
    service_units.as_device(lambda: check_backup(existing / ".infiniswap-doctor.backup", MIB))
    disk = os.statvfs(existing)
    text = f"{directory}: {format_size_short(disk.f_bavail * disk.f_frsize)} free"
    if disk.f_bavail < _FREE_SHARE_MIN * disk.f_blocks:
        yield degraded(
            "backup",
            f"{text}; a backup is as large as its device",
            f"free space there, or: --backup PATH, or backup_dir under [device] ({directory} now)",
        )
    else:
        yield good("backup", text)


def unit(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the unit of devices was written for another kernel than this one."""
    left, needed = service_units.capabilities_of_unit(root), service_units.capabilities_here()
    if left is None:
        return
    if lacking := [name for name in needed if name not in left]:
        mend = "sudo infiniswap service install"
        if not (root / service_units.UNIT_DIR / service_units.DEVICE_UNIT).exists():
            mend = (  # the package's unit, which is for its release's kernels
                f"sudo systemctl edit {service_units.DEVICE_UNIT}, and write [Service] and in the "
                f"next line CapabilityBoundingSet={' '.join(lacking)}"
            )
        yield degraded(
            "device-unit",
            f"{service_units.DEVICE_UNIT} lacks {', '.join(lacking)}, which devices need on this "
            "kernel: it was installed under another one, and what a killed `infiniswap run` "
            "leaves may stay",
            f"{mend}; then stop and start the devices",
        )
    else:
        yield good("device-unit", f"{service_units.DEVICE_UNIT} suits this kernel")


def devices(config: Config) -> Iterator[Finding]:
    """This host's devices, running and stopped."""
    for row in local_devices(config.device.run_dir, config.device.backup_dir):
        name, state = str(row["name"]), str(row["state"])
        if alarms := str(row.get("alarms") or ""):
            yield degraded("devices", f"{name}: {state}: {alarms}", _mend(name, alarms))
        elif state.startswith("not believed"):
            yield degraded("devices", f"{name}: {state}", str(row["mend"]))
        elif state.startswith("no answer"):
            log = config.device.run_dir / name / "log"
            # As a service, in the foreground, it has no log file.
            mend = f"tail {log}" if log.exists() else f"journalctl -u infiniswap-device@{name}"
            if os.geteuid() != 0:
                mend = "sudo infiniswap doctor"
            mend = str(row.get("mend") or mend)
            yield degraded("devices", f"{name}: {state}", mend)
        else:
            yield good("devices", f"{name}: {state}")
        said = row.get("degraded")
        for sentence in said if isinstance(said, list) else []:
            if sentence.startswith(f"{STARTER}: "):
                what, _, mend = sentence.removeprefix(f"{STARTER}: ").partition(". ")
                yield degraded("devices", f"{name}: {what}", mend)


def _mend(name: str, alarms: str) -> str:
    steps = [r.for_device.format(name=name) for r in REMEDIES if r.words in alarms]
    return "; ".join(steps) or f"infiniswap device show {name}"


def records(config: Config) -> Iterator[Finding]:
    """Whether the records of this host's devices can be believed."""
    run_dir, backup_dir = config.device.run_dir, config.device.backup_dir
    problems: list[InfiniswapError] = []
    try:
        rundir.check_directories(run_dir, backup_dir)
    except InfiniswapError as error:
        problems.append(error)
    if not problems:
        problems = rundir.wrong_records(run_dir, backup_dir)
    for problem in problems:
        yield degraded("records", f"{problem.where}: {problem.what}", problem.mend)
    if not problems:
        yield good("records", "nobody else can write the records of this host's devices")


def left_behind(config: Config) -> Iterator[Finding]:
    """What killed processes have left behind."""
    found = list(leftovers.find(config.device.run_dir))
    for item in found:
        yield degraded("leftovers", item.what, item.mend)
    others = [*_donors(config.daemon.run_dir), *_demos(demo_leftovers.RUN_DIR)]
    yield from others
    if not found and not others:
        yield good("leftovers", "nothing is left of earlier runs")


def _donors(run_dir: Path | None) -> Iterator[Finding]:
    # Seen after an orderly stop as well, until the grace period is over: they look alike.
    for home in [] if run_dir is None else homes.leftovers(run_dir):
        if home.used_bytes == 0 and not home.is_roots:
            continue  # only root unmounts
        if home.used_bytes == 0:
            yield degraded(
                "leftovers",
                f"{home.path}: an empty tmpfs of a stopped daemon is still mounted",
                "infiniswap daemon --release (unmounts it)",
            )
            continue
        yield degraded(
            "leftovers",
            f"{home.path}: {format_size_short(home.used_bytes)} of memory lent by a stopped "
            "daemon, kept for its successor",
            "infiniswap daemon (takes it over), or infiniswap daemon --release (gives it back)",
        )


def _demos(run_dir: Path) -> Iterator[Finding]:
    if is_held(run_dir / "lock"):
        return  # one is running
    for record in demo_leftovers.stale(run_dir):
        yield degraded(
            "leftovers",
            f"{record.work_dir}: left behind by a killed demo, perhaps with loop devices and "
            "cgroups",
            "infiniswap demo (removes it before it starts)",
        )
