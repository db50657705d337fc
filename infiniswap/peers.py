# SPDX-License-Identifier: Apache-2.0
"""The file that `cluster.peers_file` names: addresses of donors, one a line, `#` for comments."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from infiniswap.errors import ConfigError, UsageError
from infiniswap.rights import refused_reading
from infiniswap.units import CONTROL_PORT, LINK_LOCAL, HostPort, parse_host_port

PEERS_MAX: Final = 1024
"""Donors that a list may name, and that discovery keeps in mind."""

PEERS_FILE_BYTES_MAX: Final = 256 * 1024


def read_peers(path: Path) -> tuple[HostPort, ...]:
    """The addresses in the file; duplicates are dropped, order is kept. Blocking.

    Raises:
        ConfigError: unreadable, or a line that is no address; nothing of it counts then.
    """
    return parse_peers(_read(path), str(path))


def parse_peers(raw: bytes, where: str) -> tuple[HostPort, ...]:
    """As read_peers, for what was read from `where`."""
    if len(raw) > PEERS_FILE_BYTES_MAX:
        raise ConfigError(
            f"larger than {PEERS_FILE_BYTES_MAX // 1024} KiB: not a list of peers",
            where=where,
            mend="Correct [cluster] peers_file.",
        )
    try:
        lines = raw.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not text (byte {error.start} is no UTF-8)",
            where=where,
            mend="Write one HOST or HOST:PORT on each line.",
        ) from None
    found: dict[HostPort, None] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            found[parse_host_port(text, CONTROL_PORT)] = None
        except UsageError as error:
            # Not what stands there: the file may be another one, with secrets of somebody's.
            what = LINK_LOCAL if error.what.endswith(LINK_LOCAL) else "is not an address"
            raise ConfigError(
                f"line {number} {what}",
                where=where,
                mend=error.mend,
            ) from None
        if len(found) > PEERS_MAX:
            raise ConfigError(
                f"it names more than {PEERS_MAX} peers",
                where=where,
                mend="Name those that this host should use.",
            )
    return tuple(found)


def _read(path: Path) -> bytes:
    mend = "Create it, or correct [cluster] peers_file."
    try:
        # NONBLOCK: opening a FIFO must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        what, mend = refused_reading(path, "the list of peers")
        raise ConfigError(what, where=str(path), mend=mend) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the list of peers: {error.strerror}", where=str(path), mend=mend
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError("the list of peers is not a regular file", where=str(path), mend=mend)
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(PEERS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the list of peers: {error.strerror}", where=str(path), mend=mend
        ) from error
    finally:
        os.close(fd)
