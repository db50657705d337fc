# SPDX-License-Identifier: Apache-2.0
"""What root prepares for a daemon that runs as a user of its own, without capabilities.

`infiniswapd.service` calls it before the daemon starts, and before it reloads. It makes

- the home of the slabs (infiniswap.donor.home): only root may mount a tmpfs;
- copies of files that only root may read (infiniswap.donor.copies);
- the directory of the socket on which users of this host read the status;
- with `keep_awake = "auto"`, access to the kernel's latency requests;
- state that a daemon of root has left in the directory where release 0.1 kept it.

Whoever is the daemon's user may one day be somebody else's program. So root follows no name that
this user can change: it mounts and copies below directories of root's alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.code_versions import packaged_in
from infiniswap.config import LOCAL_DIR, Config, DaemonConfig, DeviceConfig
from infiniswap.donor import copies, home
from infiniswap.donor.identity import make_identity
from infiniswap.donor.memory import MemorySource
from infiniswap.donor.pool_limits import pool_limits
from infiniswap.errors import ConfigError, ConflictError, InfiniswapError, from_oserror
from infiniswap.system import mounts
from infiniswap.system.acl import let_user_in
from infiniswap.system.keep_awake import REQUEST_PATH

log = logging.getLogger(__name__)

_STATE: Final = ("*.drain", "donor.pem", "donor.crt", "host-secret")


@dataclass(frozen=True, slots=True)
class DaemonUser:
    """The daemon's user."""

    name: str
    uid: int
    gid: int


def daemon_user(name: str) -> DaemonUser:
    """The user of that name.

    Raises:
        ConfigError: this host has no such user, or it is root.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        make = "systemd-sysusers infiniswap.conf" if packaged_in() else "infiniswap service install"
        raise ConfigError(f"this host has no user {name}", mend=f"Run: {make}") from None
    if entry.pw_uid == 0:
        raise ConfigError(f"{name} is root, for whom nothing has to be prepared")
    return DaemonUser(name, entry.pw_uid, entry.pw_gid)


def prepare(
    config: Config, user: DaemonUser, memory: MemorySource, copies_dir: Path | None
) -> None:
    """Prepares everything. Does as much as it can before it raises what was first in the way.

    Args:
        config: of the daemon.
        user: its user.
        memory: figures.
        copies_dir: where copies of files go; None: nowhere.

    Raises:
        InfiniswapError: something cannot be made.
    """
    first: InfiniswapError | None = None
    steps: tuple[Callable[[], None], ...] = (
        lambda: _copy_files(config, user, copies_dir),
        lambda: _adopt_state(config, user),
        lambda: _make_places(config, user, memory),
        lambda: _let_keep_awake(config, user, REQUEST_PATH),
    )
    for step in steps:
        try:
            step()
        except InfiniswapError as error:
            first = first or error
        except OSError as error:
            where = str(error.filename or "")
            first = first or from_oserror("the daemon cannot be prepared", error, where=where)
    if first is not None:
        raise first


def _copy_files(config: Config, user: DaemonUser, directory: Path | None) -> None:
    if directory is not None:
        copies.write(config, directory, (user.uid, user.gid))


# ---------------------------------------------------------------------------- slabs


def _make_places(config: Config, user: DaemonUser, memory: MemorySource) -> None:
    daemon = config.daemon
    if daemon.run_dir is None:
        return
    copies.check_reach(daemon.run_dir, (user.uid, user.gid), "daemon.run_dir")
    home.make_run_dir(daemon.run_dir)
    _own_directory(daemon.run_dir / LOCAL_DIR, user)
    if not daemon.listen.port:
        return  # it is another donor after a restart, so its slabs end with it
    limits = pool_limits(config, memory.read())
    path = daemon.run_dir / make_identity(daemon.name, daemon.listen).donor_id
    _make_home(path, home.home_bytes(limits.slabs_max * limits.slab_bytes), user)


def _own_directory(path: Path, user: DaemonUser) -> None:
    """Makes it, in a directory of root's."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o755)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(descriptor, user.uid, user.gid)
        os.fchmod(descriptor, 0o755)  # whatever the umask is
    finally:
        os.close(descriptor)


def _make_home(path: Path, size_bytes: int, user: DaemonUser) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    if home.own_mount(path) is None:
        mounts.mount_tmpfs(path, size_bytes, mode=0o700, owner=(user.uid, user.gid))
        return
    held = home.try_lock(path)
    if held is None:
        return  # a daemon has it: this is a reload
    try:
        if os.fstat(held).st_uid == 0:
            _give(held, user)
            log.info("the slabs in %s are %s's from now on", path, user.name)
        elif os.fstat(held).st_uid != user.uid:
            raise ConflictError(
                "the slabs there belong to another user",
                where=str(path),
                mend="Give them back with: infiniswap daemon --release",
            )
        home.resize(path, size_bytes)
    finally:
        os.close(held)


def _give(directory: int, user: DaemonUser) -> None:
    """What a daemon of root has left, which nobody else can have changed. The directory itself is
    last: a call that was cut short is repeated."""
    for _, names, files, here in os.fwalk(".", dir_fd=directory):
        for name in (*names, *files):
            os.chown(name, user.uid, user.gid, dir_fd=here, follow_symlinks=False)
    os.fchown(directory, user.uid, user.gid)


def _let_keep_awake(config: Config, user: DaemonUser, path: Path) -> None:
    """Until the host restarts: who asks for it asks for it again."""
    if config.daemon.keep_awake == "auto" and path.exists():
        let_user_in(path, user.uid)


# ---------------------------------------------------------------------------- state


def _adopt_state(config: Config, user: DaemonUser) -> None:
    """Checks that the daemon can keep its state, and brings what is left where root's kept it."""
    target = config.daemon.state_dir
    if target != DaemonConfig().state_dir:
        _check_state_dir(target, user)
        return
    # In the directory of root's backups, which is closed to the daemon's user.
    source = DeviceConfig().backup_dir
    for pattern in _STATE:
        for path in sorted(source.glob(pattern)):
            if not os.path.lexists(target / path.name):
                _move(path, target, user)


def _check_state_dir(path: Path, user: DaemonUser) -> None:
    """Root changes no directory that an administrator has chosen.

    Raises:
        ConfigError: it is not the daemon's user's.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_uid == user.uid:
            return
    raise ConfigError(
        f"daemon.state_dir has to be a directory of the user {user.name}",
        where=str(path),
        mend=f"Run: mkdir -p {path}; chown -R {user.name}: {path}",
    )


def _move(path: Path, target: Path, user: DaemonUser) -> None:
    """One file, from a directory of root's to one that may be the other user's already."""
    directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        copy = os.open(path.name, flags, 0o600, dir_fd=directory)
        try:
            with open(copy, "wb") as new, path.open("rb") as old:
                shutil.copyfileobj(old, new)
                new.flush()
                os.fchmod(copy, path.stat().st_mode & 0o777)
                os.fchown(copy, user.uid, user.gid)
        except OSError:
            os.unlink(path.name, dir_fd=directory)  # or half of it would pass for all
            raise
    finally:
        os.close(directory)
    path.unlink()
    log.info("moved %s to %s", path, target)
