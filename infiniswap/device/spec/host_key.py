# SPDX-License-Identifier: Apache-2.0
"""The host key, with which a host seals the keys of devices that keep their contents: where it is.

A new one is sealed to this host's TPM (`host-key.tpm`), where there is one. Else it is in a file
that root alone may read (`host-key`); one that is there is used, whatever else there is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from infiniswap.errors import BackupError, InfiniswapError, UnavailableError, from_oserror
from infiniswap.secret import (
    HOST_KEY_BYTES,
    forget_key,
    make_host_key,
    read_host_key,
    read_sealed_host_key,
    write_new,
)
from infiniswap.system import tpm
from infiniswap.system.files import sync_directory


def sealed_path(path: Path) -> Path:
    """Where the host key is that is sealed to the TPM, by the path of one that is not."""
    return path.with_name(f"{path.name}.tpm")


def place(path: Path) -> Path | None:
    """The file that counts; None: there is no host key yet."""
    return next((file for file in (path, sealed_path(path)) if os.path.lexists(file)), None)


def is_in_tpm(path: Path) -> bool:
    """Whether the TPM is needed to open it."""
    return place(path) == sealed_path(path)


def make(path: Path, chip: tpm.Tpm | None) -> None:
    """Makes a host key where there is none. Blocking.

    Args:
        path: of one in a file.
        chip: to seal it to, if the host has one; None: it is made in a file.

    Raises:
        UnavailableError: the TPM refuses, or takes too long.
        NotPermittedError, SystemCallError: it cannot be written.
    """
    if place(path) is not None:
        return
    if chip is None or not chip.is_there() or not _make_sealed(sealed_path(path), chip):
        make_host_key(path)
    try:
        sync_directory(path.parent)
    except OSError as error:
        raise from_oserror("cannot keep the host's key", error, where=str(path)) from error


def _make_sealed(path: Path, chip: tpm.Tpm) -> bool:
    key = bytearray(os.urandom(HOST_KEY_BYTES))
    try:
        sealed = chip.seal(key)
    except UnavailableError:
        return False  # `infiniswap doctor` names the TPM that is not used
    except InfiniswapError as error:
        plain = path.with_suffix("")
        raise UnavailableError(
            f"the TPM of this host cannot seal the host key: {error.what}",
            where=tpm.NODE,
            mend="dmesg | grep -i tpm shows what the kernel says. To do without the TPM, make the "
            f"key in a file: (umask 077; head -c {HOST_KEY_BYTES} /dev/urandom > {plain})",
        ) from error
    finally:
        forget_key(key)
    try:
        with contextlib.suppress(FileExistsError):  # another device was quicker
            write_new(path, sealed)
    except OSError as error:
        raise from_oserror("cannot write this host's key", error, where=str(path)) from error
    return True


def mark(path: Path) -> bytes:
    """Which sealed host key there is; empty: none that the TPM is needed for. ConfigError."""
    return _mark(read_sealed_host_key(sealed_path(path))) if is_in_tpm(path) else b""


def _mark(sealed: bytes) -> bytes:
    return hashlib.sha256(sealed).digest()


def move_command(path: Path) -> str:
    """Moves a host key from its file to the TPM, without any change to what it has sealed."""
    return tpm.move_command(path, sealed_path(path))


@contextlib.contextmanager
def opened(path: Path, chip: tpm.Tpm, device: str) -> Iterator[tuple[bytearray, bytes]]:
    """The host key, overwritten afterwards, and its mark. Blocking.

    Args:
        path: of one in a file.
        chip: that it may be sealed to.
        device: for which it is needed.

    Raises:
        ConfigError: there is none, it is damaged, or others may read or change it.
        BackupError: the TPM does not open it.
    """
    if is_in_tpm(path):
        sealed = read_sealed_host_key(sealed_path(path))
        key, found = _unsealed(sealed_path(path), sealed, chip, device), _mark(sealed)
    else:
        key, found = read_host_key(path), b""
    try:
        yield key, found
    finally:
        forget_key(key)


def _unsealed(path: Path, sealed: bytes, chip: tpm.Tpm, device: str) -> bytearray:
    try:
        return chip.open(sealed, HOST_KEY_BYTES)
    except InfiniswapError as error:
        raise BackupError(
            f"the TPM of this host does not open the host key: {error.what}",
            where=str(path),
            mend="dmesg | grep -i tpm shows what the kernel says. Start the device again when the "
            "TPM works. If the TPM was cleared or replaced, or this disk is from another "
            "machine, the contents of this host's stopped devices can no longer be read. To "
            f"begin with zeros: rm {path}, then infiniswap device start {device} "
            "--discard-contents.",
        ) from error
