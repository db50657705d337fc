# SPDX-License-Identifier: Apache-2.0
"""Files that the configuration names and only root may read, for a daemon that is another user's.

    COPIES/                       root's
        cluster.secret_file       a copy, the daemon's user's alone
        mqtt.password_file        and so on: each file by its key

Root writes them before the daemon starts, and again before it reloads. The daemon reads the copy of
every file that its configuration names, and never the file itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap.config import SECTIONS, Config
from infiniswap.control.pki import load
from infiniswap.control.roles import Role
from infiniswap.errors import ConfigError, NotPermittedError, from_oserror
from infiniswap.secret import read_password
from infiniswap.system.reach import replaceable_by

_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of one file. A list of all public certificate authorities has 250 KiB."""


def _named(config: Config) -> Iterator[tuple[str, str, Path]]:
    """Section, name and path of each file that a daemon reads beside its configuration."""
    for section, kind in SECTIONS.items():
        for entry in dataclasses.fields(kind):
            path = getattr(config.section(section), entry.name)
            is_read = entry.name.endswith("_file") and entry.metadata.get("only") != "device"
            if is_read and path is not None:
                yield section, entry.name, path


def write(config: Config, directory: Path, owner: tuple[int, int]) -> None:
    """Copies the files, and removes copies of those that are no longer named. For root. The files
    are checked here, as the copies would hide that others may read or replace one. The daemon's own
    user may replace none either, or root would copy whatever a link of that user's leads to.

    Args:
        config: names them.
        directory: where the copies go; made where it is not there.
        owner: user and group of the daemon.

    Raises:
        ConfigError: a file cannot be used.
        NotPermittedError: others could change the directory.
        SystemCallError: a copy cannot be written.
    """
    if config.cluster.secret_file is not None:
        config.keys()
    config.second_keys()
    files = config.certificates()
    if files is not None:
        load(files, config.cluster.name, Role.DONOR)
    config.metrics_token()
    if config.mqtt.password_file is not None:
        read_password(config.mqtt.password_file)
    named = list(_named(config))
    for section, name, path in named:
        check_reach(path, owner, f"{section}.{name}")
    check_reach(directory, owner, "--copies")
    _make(directory)
    names = set()
    for section, name, path in named:
        names.add(f"{section}.{name}")
        _copy(path, directory / f"{section}.{name}", owner)
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name not in names:
                path.unlink()


def check_reach(path: Path, user: tuple[int, int], key: str) -> None:
    """Checks that the daemon's user does not decide what root finds at a path.

    Args:
        path: where root will go.
        user: numbers of the user and of its group.
        key: that names the path in the configuration.

    Raises:
        ConfigError: the user does.
        OSError: a directory on the way cannot be looked at.
    """
    if (directory := replaceable_by(path, *user)) is not None:
        raise ConfigError(
            f"the daemon's user may write to {directory}, and so decide what root finds at the "
            f"path that {key} names",
            where=str(path),
            mend="Name one in a directory of root's (/etc/infiniswap, /run/infiniswapd).",
        )


def _make(directory: Path) -> None:
    """Raises NotPermittedError, SystemCallError."""
    for path in (directory.parent, directory):
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o755)
                path.chmod(0o755)  # whatever the umask is
            status = path.lstat()
        except OSError as error:
            raise from_oserror("cannot make the directory", error, where=str(path)) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
            raise NotPermittedError(
                "users other than root may change what is in this directory",
                where=str(path),
                mend=f"Run: chown root {path}; chmod 755 {path}",
            )


def _copy(source: Path, target: Path, owner: tuple[int, int]) -> None:
    try:
        with source.open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the file: {error.strerror}",
            where=str(source),
            mend=f"Create it, or correct {target.name} in the configuration.",
        ) from error
    if len(content) > _BYTES_MAX:
        raise ConfigError("larger than 4 MiB", where=str(source), mend=f"Correct {target.name}.")
    temporary = target.with_name(f".{target.name}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchown(descriptor, *owner)
        temporary.replace(target)
    except OSError as error:
        raise from_oserror("cannot write the copy", error, where=str(target)) from error


def remove(directory: Path) -> bool:
    """Removes the copies of a daemon that does not run; False: there are none.

    Raises:
        SystemCallError: one cannot be removed.
    """
    try:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise from_oserror("cannot remove the copies", error, where=str(directory)) from error
    return True


def use(config: Config, directory: Path | None) -> Config:
    """The configuration with the copies in place of the files.

    Args:
        config: names the files.
        directory: of the copies; None: there are none, and the files are read themselves.

    Raises:
        ConfigError: a copy is missing.
    """
    if directory is None:
        return config
    for section, name, path in _named(config):
        copy = directory / f"{section}.{name}"
        if not os.path.exists(copy):
            raise ConfigError(
                f"root has made no copy of this file ({section}.{name}) for the daemon",
                where=str(path),
                mend="The lines before this one in the log of the unit say why.",
            )
        changed = dataclasses.replace(getattr(config, section), **{name: copy})
        config = dataclasses.replace(config, **{section: changed})
    return config
