# SPDX-License-Identifier: Apache-2.0
"""The cluster secret, the broker's password, the metrics token, the host key and the key of a
donor's certificate: where they are needed, and reading them only from files that are safe."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infiniswap import keys
from infiniswap.directories import make_directory
from infiniswap.errors import ConfigError, ConflictError, from_oserror
from infiniswap.keys import Keys
from infiniswap.rights import DONOR_USER, refused_reading, user_number
from infiniswap.units import HostPort, is_loopback

TOKEN_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4096
HOST_KEY_BYTES: Final = 32
_PEM_BYTES_MAX: Final = 64 * 1024
"""A key and a chain of certificates. RSA with 4096 bits needs 3 KiB for the key alone."""
_SOURCE: Final = ", for example from `head -c 32 /dev/urandom | base64`"


def make_command(path: Path) -> str:
    """The command that makes a cluster secret."""
    return f"`infiniswap init --secret {path}`"


def host_secret_path(state_dir: Path) -> Path:
    """Where a daemon without a configured secret keeps the one that it has made for its host."""
    return state_dir / "host-secret"


def host_key_path(backup_dir: Path) -> Path:
    """Where a host keeps the key that seals the keys of its stopped devices."""
    return backup_dir / "host-key"


def check_listen_secret(listen: HostPort, trust_file: Path | None) -> None:
    """Refuses to serve other hosts without a cluster secret or certificates.

    Raises:
        ConfigError: `listen` is no loopback address and no secret is configured.
    """
    if trust_file is None and not is_loopback(listen.host):
        raise ConfigError(
            "listening on an address that other hosts can reach needs a cluster secret",
            where=f"daemon.listen {listen}",
            mend=f"Make one with {make_command(Path('/etc/infiniswap/secret'))}, copy it to every "
            "host and name it in [cluster] secret_file, or name certificates there (ca_file), or "
            "listen on 127.0.0.1.",
        )


def check_metrics_listen(
    listen: HostPort | None, token: bytes | None, ca_file: Path | None
) -> None:
    """Refuses to serve metrics to whoever asks.

    Raises:
        ConfigError: there is neither a token nor an authority whose certificates readers show.
    """
    if listen is not None and token is None and ca_file is None:
        raise ConfigError(
            "serving metrics at a port needs a metrics token",
            where=f"device.metrics_listen {listen}",
            mend="Make one with `(umask 077; head -c 32 /dev/urandom | base64 > "
            "/etc/infiniswap/metrics-token)` and name it in [cluster] metrics_token_file. Without "
            "device.metrics_listen root reads them from the device's Unix socket.",
        )


def read_secret(path: Path, state_dir: Path | None = None) -> Keys:
    """The keys of a cluster secret, or a session key alone; white space around it is not part of
    it.

    Args:
        path: of the file.
        state_dir: of this host's daemon, whose user may own the secret that the host has made for
            itself; None: the file is no such secret.

    Raises:
        ConfigError: unreadable, open to other users, owned by another user, not made by a random
            number generator.
    """
    if state_dir is not None and path == host_secret_path(state_dir):
        return _parse(path, _HOST_SECRET)[0]
    return _parse(path, _CLUSTER_SECRET)[0]


def secret_text(path: Path) -> tuple[Keys, str]:
    """As `read_secret`, and the text that another host's file gets."""
    found, text = _parse(path, _CLUSTER_SECRET)
    return found, text.decode("ascii")


def _parse(path: Path, kind: _Kind) -> tuple[Keys, bytes]:
    text = _read(path, kind)
    try:
        return keys.parse(text), text
    except ValueError as error:
        raise ConfigError(
            str(error),
            where=str(path),
            mend=f"Make one with {make_command(path.with_name('secret.new'))} and use it on every "
            "host.",
        ) from None


def write_secret(path: Path, text: str) -> None:
    """Writes a new file for this user alone.

    Raises:
        ConflictError: there is such a file.
        NotPermittedError, SystemCallError: it cannot be written.
    """
    try:
        write_new(path, f"{text}\n".encode())
    except FileExistsError as error:
        raise ConflictError(
            "this file exists already, and may be in use",
            where=str(path),
            mend="Name another file, or remove this one.",
        ) from error
    except OSError as error:
        raise from_oserror("cannot write the file", error, where=str(path)) from error


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes a new file, which is complete from the moment that it is there, except on file systems
    without hard links (vfat).

    Raises:
        FileExistsError: there is one, perhaps of a process that was quicker.
        OSError: it cannot be written.
    """
    try:
        make_directory(path.parent, 0o755)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path.parent)) from error
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        _write_exclusively(temporary, content, mode)
        os.link(temporary, path)
    except OSError as error:
        # Most say the first of these two, and so does a directory that nobody may write to.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP) or not os.path.exists(temporary):
            raise
        _write_exclusively(path, content, mode)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _write_exclusively(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        file.flush()
        os.fsync(file.fileno())


def new_secret() -> str:
    """A cluster secret as a file holds it."""
    return os.urandom(keys.SECRET_BYTES).hex()


def host_keys(state_dir: Path) -> Keys | None:
    """The keys of this host's own secret; None where there is none, or it is not this user's.

    Raises:
        ConfigError: see read_secret.
    """
    path = host_secret_path(state_dir)
    if not os.access(path, os.R_OK, effective_ids=True):
        return None
    return read_secret(path, state_dir)


def make_host_secret(state_dir: Path) -> None:
    """Makes this host's own secret where there is none yet.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    path = host_secret_path(state_dir)
    if not os.path.exists(path):
        with contextlib.suppress(ConflictError):  # another daemon was quicker
            write_secret(path, new_secret())


def make_host_key(path: Path) -> None:
    """Makes this host's key where there is none yet.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    if os.path.lexists(path):
        return
    try:
        with contextlib.suppress(FileExistsError):  # another device was quicker
            write_new(path, os.urandom(HOST_KEY_BYTES))
    except OSError as error:
        raise from_oserror("cannot write this host's key", error, where=str(path)) from error


def read_host_key(path: Path) -> bytearray:
    """This host's key, which the caller overwrites after use (forget_key).

    Raises:
        ConfigError: there is none, it has another size, or others may read or change it.
    """
    kind = _Kind("host key", "device.backup_dir", HOST_KEY_BYTES, "", HOST_KEY_BYTES)
    fd, status = _open(path, kind)
    key = bytearray(HOST_KEY_BYTES)
    try:
        _check_owner(path, status, kind)
        got = os.readv(fd, [key])
    except OSError as error:
        raise ConfigError(f"cannot read the host key: {error.strerror}", where=str(path)) from error
    finally:
        os.close(fd)
    if status.st_size != HOST_KEY_BYTES or got != HOST_KEY_BYTES:
        raise ConfigError(
            f"the host key has {status.st_size} bytes, not {HOST_KEY_BYTES}",
            where=str(path),
            mend="Restore that file. Without it the contents of stopped devices cannot be read.",
        )
    return key


def read_sealed_host_key(path: Path) -> bytes:
    """This host's key as its TPM has sealed it.

    Raises:
        ConfigError: unreadable or empty, or others may change it.
    """
    key = "device.backup_dir"
    return _read(path, _Kind("sealed host key", key, 1, "", _PEM_BYTES_MAX, is_public=True))


def forget_key(key: bytearray) -> None:
    """Overwrites it."""
    key[:] = bytes(len(key))


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
    kind = _Kind("metrics token", "[cluster] metrics_token_file", TOKEN_BYTES_MIN, _SOURCE)
    token = _read(path, kind)
    if not all(33 <= byte <= 126 for byte in token):
        raise ConfigError(
            "the metrics token has bytes that are no visible ASCII",
            where=str(path),
            mend="Make another one, for example with `head -c 32 /dev/urandom | base64`.",
        )
    return token


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Files of [cluster]: the authority's certificate, this host's, and the key of that."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class CertificateTexts:
    """Their contents, in PEM form."""

    authority: bytes
    chain: bytes
    key: bytes = field(repr=False)


def read_certificates(files: CertificateFiles) -> CertificateTexts:
    """The contents of the files.

    Raises:
        ConfigError: one is unreadable or empty, others may change it, or may read the key.
    """
    key = "key of this host's certificate"
    return CertificateTexts(
        _read(files.ca, _public("certificate of the authority", "[cluster] ca_file")),
        _read(files.certificate, _public("certificate of this host", "[cluster] certificate_file")),
        _read(files.key, _Kind(key, "[cluster] key_file", 1, "", _PEM_BYTES_MAX)),
    )


def read_public(path: Path, noun: str, key: str) -> bytes:
    """A certificate that everybody may read.

    Args:
        path: of the file.
        noun: what it is.
        key: of the configuration, that names the file.

    Raises:
        ConfigError: it is unreadable or empty, or others may change it.
    """
    return _read(path, _public(noun, key))


def _public(noun: str, key: str) -> _Kind:
    return _Kind(noun, key, 1, "", _PEM_BYTES_MAX, is_public=True)


def read_tls_key(path: Path, port: str, key: str) -> bytes:
    """The key of a certificate of this host's own, and the certificate, in PEM form.

    Args:
        path: of the file.
        port: that shows it.
        key: of the configuration, that names the directory.

    Raises:
        ConfigError: as read_secret.
    """
    kind = _Kind(f"key of the {port}", key, 1, "", _PEM_BYTES_MAX)
    return _read(path, kind)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a file holds, and the key that names it. Everybody may read what is public. `user` may
    own the file beside root and ourselves, and the directory as well, so no link is followed."""

    noun: str
    key: str
    bytes_min: int
    source: str
    bytes_max: int = SECRET_BYTES_MAX
    user: str = ""
    is_public: bool = False


_CLUSTER_SECRET: Final = _Kind("cluster secret", "[cluster] secret_file", 1, "")
_HOST_SECRET: Final = _Kind("secret of this host", "daemon.state_dir", 1, "", user=DONOR_USER)


def _open(path: Path, kind: _Kind) -> tuple[int, os.stat_result]:
    where = str(path)
    try:
        # NONBLOCK: opening a FIFO must not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if kind.user else 0)
        fd = os.open(path, flags)
    except PermissionError as error:
        what, mend = refused_reading(path, f"the {kind.noun}")
        raise ConfigError(what, where=where, mend=mend) from error
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError)
        mode = "" if kind.is_public else " (mode 0600)"
        raise ConfigError(
            f"cannot read the {kind.noun}: {error.strerror}",
            where=where,
            mend=f"{f'Create it{mode} or correct' if is_absent else 'Correct'} {kind.key}.",
        ) from error
    return fd, os.fstat(fd)


def _read(path: Path, kind: _Kind) -> bytes:
    where = str(path)
    fd, status = _open(path, kind)
    try:
        secret = b""
        if stat.S_ISREG(status.st_mode):
            secret = os.read(fd, kind.bytes_max + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the {kind.noun}: {error.strerror}", where=where) from error
    finally:
        os.close(fd)
    _check_owner(path, status, kind)
    if not kind.bytes_min <= len(secret) <= kind.bytes_max:
        raise ConfigError(
            f"the {kind.noun} has {len(secret)} bytes"
            if len(secret) <= kind.bytes_max
            else f"the {kind.noun} has more than {kind.bytes_max} bytes",
            where=where,
            mend=f"It needs {kind.bytes_min} to {kind.bytes_max}{kind.source}.",
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
    if kind.is_public and mode & 0o022:
        raise ConfigError(
            f"the {kind.noun} has mode {mode:04o}, so other users may change it",
            where=where,
            mend=f"Run: chmod 644 {path} - and check what is in it.",
        )
    if not kind.is_public and mode & 0o177:
        raise ConfigError(
            f"the {kind.noun} has mode {mode:04o}, so other users may read or change it",
            where=where,
            mend=f"Run: chmod 600 {path} - and replace it if somebody else may have read it.",
        )
    owners = (0, os.geteuid(), user_number(kind.user) if kind.user else None)
    if status.st_uid not in owners:
        raise ConfigError(
            f"the {kind.noun} belongs to another user ({status.st_uid})",
            where=where,
            mend=f"Run: chown root {path}",
        )
