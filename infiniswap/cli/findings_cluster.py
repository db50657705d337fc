# SPDX-License-Identifier: Apache-2.0
"""Findings about what is configured: backup, secret, donors, devices, and what was left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap.cli import findings_discovery
from infiniswap.cli.findings import Finding, degraded, good
from infiniswap.cli.status import DonorRow, ask
from infiniswap.config import Config, check_listen_secret
from infiniswap.demo import leftovers as demo_leftovers
from infiniswap.device.cleanup import leftovers
from infiniswap.device.control.listing import local_devices
from infiniswap.discovery.find import find
from infiniswap.donor import home as homes
from infiniswap.system.backup import check_backup
from infiniswap.system.files import is_locked
from infiniswap.units import MIB, format_size, format_size_short

_FREE_SHARE_MIN: Final = 0.05

_ALARMS: Final = (
    ("backup refuses writes", "df -h {backup}; dmesg | tail (free the disk; writes are retried)"),
    ("from the backup with other bytes", "dmesg | tail (the disk returns wrong data: replace it)"),
    ("was given up", "infiniswap status (see that donor's log; it is tried again by itself)"),
    ("neither a donor nor a backup", "infiniswap status (start more donors, or raise their pool)"),
    ("are lost with donors", "end the programs that use it, then: infiniswap device remove {name}"),
    ("front end has ended", "infiniswap device restart {name}"),
    ("was detached by somebody else", "infiniswap device restart {name}"),
    (
        "swap area was taken out of use",
        "swapon --discard /dev/infiniswap/{name} (or: infiniswap device stop {name})",
    ),
    ("connections are not complete", "dmesg | grep nbd (new ones are tried by themselves)"),
)
"""Words of an alarm (infiniswap.device.slabs.alarms) and what to do about it."""


def backup(config: Config) -> Iterator[Finding]:
    """Where devices keep their local copy."""
    directory = config.device.backup_dir
    existing = directory
    while not existing.exists():
        existing = existing.parent
    check_backup(existing / ".infiniswap-doctor.backup", MIB)
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


def secret(config: Config) -> Iterator[Finding]:
    """Whether a daemon could serve other hosts. Raises what is wrong with it."""
    found = config.secret()
    check_listen_secret(config.daemon.listen, found)
    if found is not None:
        yield good("secret", f"{config.cluster.secret_file}: {len(found)} bytes, for root alone")
    else:
        yield good("secret", "none, and none is needed: the daemon serves this host alone")


def donors(config: Config) -> Iterator[Finding]:
    """Every donor that is named or announced."""
    found = find(config)
    peers = found.addresses
    if config.cluster.discovery == "mqtt":
        yield from findings_discovery.discovery(config, found)
    if not peers:
        yield degraded(
            "donors",
            "none is configured, and none is found",
            "infiniswap doctor --donors HOST[:PORT],... (for good: `peers` under [cluster])",
        )
        return
    for row in asyncio.run(ask(peers, config.secret(), config.cluster.ask_s)):
        yield from _donor(config, row)


def _donor(config: Config, row: DonorRow) -> Iterator[Finding]:
    if row.status is None:
        failure = row.failure
        what, mend = (failure.what, failure.mend) if failure else (row.error, "")
        yield degraded(
            "donors", f"{row.address}: {what}", mend or f"see the daemon's log on {row.address}"
        )
        return
    status, pool = row.status, row.status.pool
    slab_bytes = status.slab_bytes
    text = (
        f"{row.address} ({status.donor_name}): can lend "
        f"{format_size_short(pool.can_map * slab_bytes)}"
    )
    if slab_bytes != config.device.slab_bytes:
        size = format_size(slab_bytes)
        yield degraded(
            "donors",
            f"{text}, in slabs of {size}; devices here have slabs of "
            f"{format_size(config.device.slab_bytes)}, so it refuses them",
            f'slab = "{size}" under [device] (or --slab {size}); the same in the whole cluster',
        )
    elif status.draining:
        yield degraded(
            "donors", f"{text}; it is {row.state}", f"name another donor, or wait for {row.address}"
        )
    elif not pool.can_map:
        yield degraded(
            "donors",
            f"{text}: it {status.no_room}"
            if status.no_room
            else f"{text}: its pool is lent, or its host needs the memory itself",
            "raise --pool or lower --headroom there, or name more donors",
        )
    else:
        yield good("donors", text)
    if pool.slabs_unpinned:
        yield degraded(
            "donors",
            f"{row.address}: {pool.slabs_unpinned} of its slabs are not locked in memory, so that "
            "host may swap them out",
            "there: LimitMEMLOCK=infinity in the daemon's unit (or ulimit -l unlimited), then "
            "restart it",
        )


def devices(config: Config) -> Iterator[Finding]:
    """This host's devices, running and stopped."""
    for row in local_devices(config.device.run_dir, config.device.backup_dir):
        name, state = str(row["name"]), str(row["state"])
        if alarms := str(row.get("alarms") or ""):
            yield degraded("devices", f"{name}: {state}: {alarms}", _mend(config, name, alarms))
        elif state.startswith("no answer"):
            log = config.device.run_dir / name / "log"
            # In the foreground, as a service, it has no log of its own.
            mend = f"tail {log}" if log.exists() else f"journalctl -u infiniswap-device@{name}"
            if os.geteuid() != 0:
                mend = "sudo infiniswap doctor"
            yield degraded("devices", f"{name}: {state}", mend)
        else:
            yield good("devices", f"{name}: {state}")


def _mend(config: Config, name: str, alarms: str) -> str:
    steps = [
        step.format(name=name, backup=config.device.backup_dir)
        for words, step in _ALARMS
        if words in alarms
    ]
    return "; ".join(steps) or f"infiniswap device show {name}"


def left_behind(config: Config) -> Iterator[Finding]:
    """What killed processes of ours have left."""
    found = list(leftovers.find(config.device.run_dir))
    for item in found:
        yield degraded("leftovers", item.what, item.mend)
    others = [*_donors(config.daemon.run_dir), *_demos(demo_leftovers.RUN_DIR)]
    yield from others
    if not found and not others:
        yield good("leftovers", "nothing is left of earlier runs")


def _donors(run_dir: Path | None) -> Iterator[Finding]:
    # After a stop in order, too, until the grace period is over: nobody can tell from outside.
    for home in [] if run_dir is None else homes.leftovers(run_dir):
        yield degraded(
            "leftovers",
            f"{home.path}: {format_size_short(home.used_bytes)} of memory that a daemon has lent "
            "and that waits for its successor",
            "infiniswap daemon (goes on with it), or infiniswap daemon --release (gives it back)",
        )


def _demos(run_dir: Path) -> Iterator[Finding]:
    if _is_held(run_dir / "lock"):
        return  # one is running
    for record in demo_leftovers.stale(run_dir):
        yield degraded(
            "leftovers",
            f"{record.work_dir}: left by a demo that was killed, maybe with loop devices and "
            "cgroups",
            "infiniswap demo (takes it away before it starts)",
        )


def _is_held(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_locked(lock)
    finally:
        os.close(lock)
