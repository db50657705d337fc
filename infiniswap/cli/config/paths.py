# SPDX-License-Identifier: Apache-2.0
"""Paths and permissions of a configuration that would make a start fail."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from infiniswap.cli.config import addresses
from infiniswap.config import Config, DeviceConfig
from infiniswap.control.access import check_credentials
from infiniswap.control.own_certificate import DEVICE, kept_certificate, key_path
from infiniswap.device.spec.rundir import wrong_records
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.own_code import check_program
from infiniswap.rights import DONOR_USER
from infiniswap.secret import (
    check_listen_secret,
    check_metrics_listen,
    forget_key,
    host_key_path,
    read_host_key,
    read_password,
)
from infiniswap.system.backup import MEND, check_backup
from infiniswap.system.files import check_own_directory
from infiniswap.system.service_units import as_device
from infiniswap.units import MIB

PROBE_NAME = ".infiniswap-check.backup"
"""Name of a file that is only asked about, never made."""


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _host_key(config: Config) -> None:
    path = host_key_path(config.device.backup_dir)
    if os.path.lexists(path):  # the first device that needs it makes it
        forget_key(read_host_key(path))


def _metrics_certificate(config: Config) -> None:
    directory = config.device.backup_dir
    has_port = config.device.metrics_listen is not None and config.cluster.ca_file is None
    if has_port and os.path.lexists(key_path(directory, DEVICE)):  # a device's start makes it
        kept_certificate(directory, DEVICE)


def problems(config: Config, *, has_devices: bool) -> Iterator[InfiniswapError | str]:
    """Errors, and notes about what matters only to some.

    Args:
        config: to look at.
        has_devices: whether devices are declared on this host.
    """
    yield from _guard(lambda: check_listen_secret(config.daemon.listen, config.cluster.trust_file))
    yield from _guard(lambda: check_credentials(config))
    if words := shlex.split(config.slo.command):
        yield from _guard(lambda: check_program(Path(words[0]), "daemon.slo.command"))
    yield from _guard(lambda: _host_key(config))
    yield from _guard(
        lambda: check_metrics_listen(
            config.device.metrics_listen, config.metrics_token(), config.cluster.ca_file
        )
    )
    yield from _guard(lambda: _metrics_certificate(config))
    yield from addresses.problems(config)
    yield from _pool(config)
    for key, directory in (
        ("daemon.run_dir", config.daemon.run_dir),
        ("daemon.state_dir", config.daemon.state_dir),
        ("device.run_dir", config.device.run_dir),
        ("device.backup_dir", config.device.backup_dir),
    ):
        if directory is not None:
            check = functools.partial(check_directory, key, directory)
            is_device = key.startswith("device.")
            yield from _guard(functools.partial(as_device, check) if is_device else check)
    yield from wrong_records(config.device.run_dir, config.device.backup_dir)
    yield from as_device(lambda: list(_backup(config, has_devices)))
    yield from _guard(lambda: check_discovery(config))


def _guard(check: Callable[[], None]) -> Iterator[InfiniswapError]:
    try:
        check()
    except InfiniswapError as error:
        yield error
    except OSError as error:
        yield ConfigError(f"cannot be checked: {error.strerror}", where=str(error.filename))


def _pool(config: Config) -> Iterator[InfiniswapError | str]:
    from infiniswap.donor.memory import memory_source
    from infiniswap.donor.pool_limits import pool_limits, pool_note

    try:
        figures = memory_source(None).read()
        if note := pool_note(pool_limits(config, figures), figures):
            yield note
    except InfiniswapError as error:
        yield error


def check_discovery(config: Config) -> None:
    """Reads the peers file, the broker's password and certificates.

    Raises:
        ConfigError: one cannot be used.
    """
    from infiniswap.discovery.broker import tls_context

    config.peers()
    if config.mqtt.password_file is not None:
        read_password(config.mqtt.password_file)
    tls_context(config.mqtt)


def check_directory(key: str, path: Path) -> None:
    """Accepts a directory that exists or can be made.

    Raises:
        ConfigError: it is no directory, or not writable.
        NotPermittedError: other users may change what is in it.
    """
    found = existing(path)
    if not found.is_dir():
        raise ConfigError(
            f"{key} ({path}): {found} is not a directory", mend="Move it away, or name another one."
        )
    if found == path and key.startswith("device."):
        check_own_directory(path, key)
    elif found == path and key == "daemon.run_dir":
        check_own_directory(path, key, DONOR_USER)
    if not os.access(found, os.W_OK | os.X_OK):
        owner = found.stat().st_uid
        raise ConfigError(
            f"{key} ({path}): {found} is not writable",
            mend="Name a directory on a file system that is not read-only."
            if owner == 0
            else f"User {owner} owns it, and not all of root's rights are used there: name a "
            "directory of root's.",
        )


def _backup(config: Config, has_devices: bool) -> Iterator[InfiniswapError | str]:
    directory = config.device.backup_dir
    try:
        check_backup(existing(directory) / PROBE_NAME, MIB)
    except InfiniswapError as error:
        more = error.mend.removeprefix(MEND)
        # A host that only lends needs no backups.
        if has_devices or directory != DeviceConfig().backup_dir:
            yield ConfigError(
                f"device.backup_dir ({directory}) cannot hold backups: {error.what}",
                where=error.where,
                mend=f"Name a directory on a local disk (ext4 or xfs).{more}",
            )
        else:
            yield (
                f"device.backup_dir ({directory}) cannot hold backups ({error.what}): devices of "
                "this host need --backup, or another directory"
            )
