# SPDX-License-Identifier: Apache-2.0
"""The cluster secret, the broker's password and the metrics token: where they are needed, and
reading them only from files that are safe."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.errors import ConfigError
from infiniswap.rights import refused_reading
from infiniswap.units import HostPort, is_loopback

SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4096
_SOURCE: Final = ", for example from `head -c 32 /dev/urandom | base64`"


def check_listen_secret(listen: HostPort, secret: bytes | None) -> None:
    """Refuses to serve other hosts without a cluster secret.

    Raises:
        ConfigError: `listen` is no loopback address and there is no secret.
    """
    if secret is None and not is_loopback(listen.host):
        raise ConfigError(
            "listening on an address that other hosts can reach needs a cluster secret",
            where=f"daemon.listen {listen}",
            mend="Make one with `(umask 077; head -c 32 /dev/urandom | base64 > "
            "/etc/infiniswap/secret)`, copy it to every host and name it in [cluster] "
            "secret_file, or listen on 127.0.0.1.",
        )


def check_metrics_listen(listen: HostPort | None, token: bytes | None) -> None:
    """Refuses to serve metrics to other hosts without a token.

    Raises:
        ConfigError: `listen` is no loopback address and there is no token.
    """
    if listen is not None and token is None and not is_loopback(listen.host):
        raise ConfigError(
            "serving metrics on an address that other hosts can reach needs a metrics token",
            where=f"device.metrics_listen {listen}",
            mend="Make one with `(umask 077; head -c 32 /dev/urandom | base64 > "
            "/etc/infiniswap/metrics-token)` and name it in [cluster] metrics_token_file, or "
            "listen on 127.0.0.1.",
        )


def read_secret(path: Path) -> bytes:
    """The cluster secret; white space around it is not part of it.

    Raises:
        ConfigError: unreadable, open to other users, owned by another user, shorter than
            SECRET_BYTES_MIN.
    """
    return _read(
        path,
        _Kind(
            "cluster secret",
            "[cluster] secret_file",
            SECRET_BYTES_MIN,
            _SOURCE,
        ),
    )


def read_password(path: Path) -> str:
    """The password for the broker; white space around it is not part of it.

    Raises:
        ConfigError: unreadable, open to other users, owned by another user, empty, not text.
    """
    raw = _read(path, _Kind("broker's password", "[mqtt] password_file", 1, ""))
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConfigError("the broker's password is not text", where=str(path)) from None


def read_metrics_token(path: Path | None) -> bytes | None:
    """The metrics token, None without a file of one.

    Raises:
        ConfigError: as read_secret, or it is nothing that could stand in an HTTP header.
    """
    if path is None:
        return None
    kind = _Kind("metrics token", "[cluster] metrics_token_file", SECRET_BYTES_MIN, _SOURCE)
    token = _read(path, kind)
    if not all(33 <= byte <= 126 for byte in token):
        raise ConfigError(
            "the metrics token has bytes that are no visible ASCII",
            where=str(path),
            mend="Make another one, for example with `head -c 32 /dev/urandom | base64`.",
        )
    return token


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a file holds, and the key that names it."""

    noun: str
    key: str
    bytes_min: int
    source: str


def _read(path: Path, kind: _Kind) -> bytes:
    where = str(path)
    try:
        # NONBLOCK: opening a FIFO must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        what, mend = refused_reading(path, f"the {kind.noun}")
        raise ConfigError(what, where=where, mend=mend) from error
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError)
        raise ConfigError(
            f"cannot read the {kind.noun}: {error.strerror}",
            where=where,
            mend=f"{'Create it (mode 0600) or correct' if is_absent else 'Correct'} {kind.key}.",
        ) from error
    try:
        status = os.fstat(fd)
        secret = b""
        if stat.S_ISREG(status.st_mode):
            secret = os.read(fd, SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the {kind.noun}: {error.strerror}", where=where) from error
    finally:
        os.close(fd)
    _check_owner(path, status, kind)
    if not kind.bytes_min <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"the {kind.noun} has {len(secret)} bytes"
            if len(secret) <= SECRET_BYTES_MAX
            else f"the {kind.noun} has more than {SECRET_BYTES_MAX} bytes",
            where=where,
            mend=f"It needs {kind.bytes_min} to {SECRET_BYTES_MAX}{kind.source}.",
        )
    return secret


def _check_owner(path: Path, status: os.stat_result, kind: _Kind) -> None:
    where = str(path)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"the {kind.noun} is not a regular file",
            where=where,
            mend=f"Correct {kind.key}.",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o177:
        raise ConfigError(
            f"the {kind.noun} has mode {mode:04o}, so other users may read or change it",
            where=where,
            mend=f"Run: chmod 600 {path} - and replace it if somebody else may have read it.",
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"the {kind.noun} belongs to another user ({status.st_uid})",
            where=where,
            mend=f"Run: chown root {path}",
        )
